//! Random numbers whose stream never changes: a plan's seed must give the same plan in the next release too, which
//! the generators of general-purpose crates do not promise.

/// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
#[derive(Debug, Clone)]
pub struct Rng {
    state: u64,
}

impl Rng {
    /// The stream of a seed.
    pub const fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// An independent stream for the part of the work called `part`, whatever thread does it.
    pub fn fork(seed: u64, part: u64) -> Self {
        let mut mixed = Self::new(seed ^ part.wrapping_mul(0xA076_1D64_78BD_642F));
        Self::new(mixed.next_u64())
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in `[0, 1)`.
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Uniform in `[low, high)`.
    pub fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.unit()
    }

    /// Uniform in `0..n`; 0 where `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next_u64()) * n as u128) >> 64) as usize
    }

    /// Exponential with mean 1.
    pub fn exponential(&mut self) -> f64 {
        -(1.0 - self.unit()).ln()
    }

    /// Standard normal (Box and Muller).
    pub fn normal(&mut self) -> f64 {
        let radius = (2.0 * self.exponential()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// Log-normal with the given mean and standard deviation over mean.
    pub fn log_normal(&mut self, mean: f64, cv: f64) -> f64 {
        let variance = (cv * cv).ln_1p();
        mean * (variance.sqrt() * self.normal() - variance / 2.0).exp()
    }

    /// Puts `items` in a random order (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_is_the_published_one() {
        // First outputs of the reference implementation for seed 1234567.
        let mut rng = Rng::new(1_234_567);
        assert_eq!(rng.next_u64(), 6_457_827_717_110_365_317);
        assert_eq!(rng.next_u64(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn draws_have_the_moments_they_are_asked_for() {
        let mut rng = Rng::new(1);
        let n = 200_000;
        let draws: Vec<f64> = (0..n).map(|_| rng.log_normal(500.0, 0.4)).collect();
        let mean = draws.iter().sum::<f64>() / n as f64;
        let deviation = (draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64).sqrt();
        assert!((mean / 500.0 - 1.0).abs() < 0.01, "{mean}");
        assert!((deviation / mean / 0.4 - 1.0).abs() < 0.02, "{deviation}");
    }
}
