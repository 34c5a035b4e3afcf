//! A range of numbers with round steps.

/// How many steps there are about.
const STEPS: f64 = 7.0;

pub(crate) struct Axis {
    pub(crate) low: f64,
    pub(crate) high: f64,
    pub(crate) step: f64,
}

impl Axis {
    /// Reaches from 0, or below, beyond the largest value.
    pub(crate) fn over(values: impl Iterator<Item = f64>) -> Self {
        let ends = |(low, high): (f64, f64), value: f64| (low.min(value), high.max(value));
        let (low, high) = values.filter(|value| value.is_finite()).fold((0.0, 0.0), ends);
        let rough = ((high - low) / STEPS).max(1e-3);
        let magnitude = 10_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0].into_iter().map(|by| by * magnitude).find(|step| *step >= rough);
        let step = step.unwrap_or(10.0 * magnitude);
        // What was measured at 25 may have come out as 25.01: that is no reason for a further step.
        let (low, high) = ((low / step).floor() * step, (high / step - 0.01).ceil() * step);
        Self { low, high: high.max(low + step), step }
    }

    /// Where a value lies: 0 at the low end, 1 at the high.
    pub(crate) fn share(&self, value: f64) -> f64 {
        (value - self.low) / (self.high - self.low)
    }

    pub(crate) fn ticks(&self) -> impl Iterator<Item = f64> {
        let count = ((self.high - self.low) / self.step).round() as u32;
        (0..=count).map(|i| self.low + f64::from(i) * self.step)
    }

    /// A tick's text, with the decimals that its step needs.
    pub(crate) fn label(&self, tick: f64) -> String {
        let decimals = (-self.step.log10().floor()).max(0.0) as usize;
        // Adding 0 takes the sign off a negative zero.
        format!("{:.decimals$}", (tick / self.step).round() * self.step + 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_reach_over_all_values() {
        let labels = |values: &[f64]| {
            let axis = Axis::over(values.iter().copied());
            axis.ticks().map(|tick| axis.label(tick)).collect::<Vec<_>>()
        };
        assert_eq!(labels(&[0.0, 25.0]), ["0", "5", "10", "15", "20", "25"]);
        assert_eq!(labels(&[-0.1, 1.1]), ["-0.2", "0.0", "0.2", "0.4", "0.6", "0.8", "1.0", "1.2"]);
        assert_eq!(labels(&[]).first().map(String::as_str), Some("0.000"));
    }
}
