//! Which gaps are measured.

use cluster::Millis;

use super::IdleGapError;

/// Idle gaps, rising strictly. The first is none: the control.
#[derive(Debug, Clone, PartialEq)]
pub struct Gaps(Vec<Millis>);

impl Gaps {
    /// Beyond a second nothing is idling any more but waiting for work; the paper saw no change beyond 25 ms.
    pub const LONGEST: Millis = Millis(1000.0);

    /// `gaps` in rising order, each once, and no gap at all.
    pub fn new(gaps: &[Millis]) -> Result<Self, IdleGapError> {
        if let Some(bad) = gaps.iter().find(|gap| !(0.0..=Self::LONGEST.0).contains(&gap.0)) {
            return Err(IdleGapError::Gap { gap_ms: bad.0 });
        }
        let mut all: Vec<f64> = gaps.iter().map(|gap| gap.0).collect();
        all.push(0.0);
        all.sort_by(f64::total_cmp);
        all.dedup();
        Ok(Self(all.into_iter().map(Millis).collect()))
    }

    /// All of them.
    pub fn all(&self) -> &[Millis] {
        &self.0
    }
}

/// The paper's range: the effect sets in at once and has reached its ceiling at 25 ms.
impl Default for Gaps {
    fn default() -> Self {
        Self([0.0, 1.0, 2.0, 5.0, 10.0, 25.0].map(Millis).to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_rise_and_begin_with_none() {
        let gaps = Gaps::new(&[5.0, 1.0, 5.0, -0.0].map(Millis)).unwrap();
        assert_eq!(gaps.all(), [0.0, 1.0, 5.0].map(Millis));
        assert_eq!(Gaps::new(Gaps::default().all()).unwrap(), Gaps::default());
    }

    #[test]
    fn what_is_no_gap_is_refused() {
        for bad in [-1.0, f64::NAN, f64::INFINITY, 1000.1] {
            let refused = Gaps::new(&[Millis(bad)]);
            assert!(matches!(refused, Err(IdleGapError::Gap { .. })), "{bad}");
        }
    }
}
