//! How cuts are written on the command line: `10,20`, or `every` for a cut after every block.

use std::str::FromStr;

use cluster::{LayerRange, LayerRangeError};

/// Where a model is to be cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Cuts {
    /// Before these blocks.
    At(Vec<u32>),
    /// Into slices of one block.
    Every,
}

impl Cuts {
    /// The slices of a model of `n_layer` blocks.
    pub(crate) fn ranges(&self, n_layer: u32) -> Result<Vec<LayerRange>, LayerRangeError> {
        match self {
            Self::At(cuts) => LayerRange::from_cuts(cuts, n_layer),
            Self::Every => LayerRange::from_cuts(&(1..n_layer).collect::<Vec<_>>(), n_layer),
        }
    }
}

impl FromStr for Cuts {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "every" {
            return Ok(Self::Every);
        }
        let cuts: Result<Vec<u32>, _> = text.split(',').map(|cut| cut.trim().parse()).collect();
        cuts.map(Self::At)
            .map_err(|_| format!("{text:?} is neither a list of block numbers like 10,20 nor `every`"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_are_read_as_people_write_them() {
        assert_eq!("10,20".parse(), Ok(Cuts::At(vec![10, 20])));
        assert_eq!("10, 20".parse(), Ok(Cuts::At(vec![10, 20])));
        assert_eq!("every".parse(), Ok(Cuts::Every));
        assert!("10,,20".parse::<Cuts>().is_err());
        assert!("-1".parse::<Cuts>().is_err());
    }

    #[test]
    fn every_cuts_after_every_block() {
        assert_eq!(Cuts::Every.ranges(3).unwrap().len(), 3);
        assert_eq!(Cuts::Every.ranges(1).unwrap().len(), 1);
    }
}
