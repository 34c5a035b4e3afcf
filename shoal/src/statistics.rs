//! The few numbers that a bench prints.

/// The middle of `samples`, or the mean of the two in the middle; 0 of none.
pub(crate) fn median(samples: &[f64]) -> f64 {
    quantile(samples, 0.5)
}

/// The distance between the quartiles: half of all samples lie in a band this wide.
pub(crate) fn spread(samples: &[f64]) -> f64 {
    quantile(samples, 0.75) - quantile(samples, 0.25)
}

/// What a share of the samples is below, linear between neighbours; 0 of none.
pub(crate) fn quantile(samples: &[f64], share: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let place = share * last as f64;
    let (below, above) = (place.floor() as usize, place.ceil() as usize);
    sorted[below] + (sorted[above] - sorted[below]) * (place - place.floor())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_ignores_outliers() {
        assert_eq!(median(&[1.0, 900.0, 2.0]), 2.0);
        assert_eq!(median(&[1.0, 2.0, 3.0, 4.0]), 2.5);
        assert_eq!(median(&[]), 0.0);
    }

    #[test]
    fn the_spread_is_that_of_the_middle_half() {
        assert_eq!(spread(&[1.0, 2.0, 3.0, 4.0, 5.0]), 2.0);
        assert_eq!(spread(&[7.0]), 0.0);
    }
}
