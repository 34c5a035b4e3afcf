//! The few numbers that measurements become. Knows nothing of what was measured.

/// Half of all samples lie between `lower` and `upper`, and half on either side of `median`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Quartiles {
    /// A quarter of the samples lies below.
    pub lower: f64,
    /// The middle.
    pub median: f64,
    /// A quarter of the samples lies above.
    pub upper: f64,
}

impl Quartiles {
    /// The quartiles of `samples`; zeros of none.
    pub fn of(samples: &[f64]) -> Self {
        Self {
            lower: quantile(samples, 0.25),
            median: quantile(samples, 0.5),
            upper: quantile(samples, 0.75),
        }
    }

    /// How wide the band is in which half of all samples lie.
    pub fn spread(self) -> f64 {
        self.upper - self.lower
    }
}

/// The middle of `samples`, or the mean of the two in the middle; 0 of none.
pub fn median(samples: &[f64]) -> f64 {
    quantile(samples, 0.5)
}

/// The distance between the quartiles.
pub fn spread(samples: &[f64]) -> f64 {
    Quartiles::of(samples).spread()
}

/// The value below which `share` of the samples lies, linear between neighbours; 0 of none.
pub fn quantile(samples: &[f64], share: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let place = share * last as f64;
    let (below, above) = (place.floor() as usize, place.ceil() as usize);
    sorted[below] + (sorted[above] - sorted[below]) * (place - place.floor())
}

/// The sequence that never falls and is nearest to `values` in least squares: isotonic regression, by pooling neighbours
/// that fall into their mean.
pub fn never_falling(values: &[f64]) -> Vec<f64> {
    let mut pools: Vec<(f64, usize)> = Vec::with_capacity(values.len());
    for &value in values {
        let (mut sum, mut count) = (value, 1);
        while let Some(&(before, size)) = pools.last()
            && before / size as f64 > sum / count as f64
        {
            (sum, count) = (sum + before, count + size);
            pools.pop();
        }
        pools.push((sum, count));
    }
    pools.iter().flat_map(|&(sum, count)| std::iter::repeat_n(sum / count as f64, count)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_median_ignores_outliers() {
        assert_eq!(median(&[1.0, 900.0, 2.0]), 2.0);
        assert_eq!(median(&[1.0, 2.0, 3.0, 4.0]), 2.5);
        assert_eq!(median(&[]), 0.0);
    }

    #[test]
    fn the_quartiles_hold_the_middle_half() {
        let quartiles = Quartiles::of(&[5.0, 1.0, 4.0, 2.0, 3.0]);
        assert_eq!(quartiles, Quartiles { lower: 2.0, median: 3.0, upper: 4.0 });
        assert_eq!(quartiles.spread(), 2.0);
        assert_eq!(spread(&[7.0]), 0.0);
    }

    #[test]
    fn what_falls_is_pooled_into_its_mean() {
        assert_eq!(never_falling(&[1.0, 3.0, 2.0, 4.0]), [1.0, 2.5, 2.5, 4.0]);
        assert_eq!(never_falling(&[3.0, 2.0, 1.0]), [2.0; 3]);
        assert_eq!(never_falling(&[]), [0.0; 0]);
    }

    proptest! {
        #[test]
        fn a_fit_never_falls_keeps_the_mean_and_leaves_what_rises_alone(
            values in prop::collection::vec(-100.0..100.0, 1..20),
        ) {
            let mut values: Vec<f64> = values;
            let fit = never_falling(&values);
            prop_assert_eq!(fit.len(), values.len());
            prop_assert!(fit.windows(2).all(|pair| pair[0] <= pair[1] + 1e-9));
            prop_assert!((fit.iter().sum::<f64>() - values.iter().sum::<f64>()).abs() < 1e-9);
            values.sort_by(f64::total_cmp);
            prop_assert_eq!(never_falling(&values), values);
        }
    }
}
