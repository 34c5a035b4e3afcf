//! How cuts are written on the command line: `10,20`, or `every` for a cut wherever the model can be cut.

use std::str::FromStr;

use cluster::{LayerRange, LayerRangeError, ModelShape};

/// Where a model is to be cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Cuts {
    /// Before these blocks.
    At(Vec<u32>),
    /// Into as many slices as there can be: of one block each, in most architectures.
    Every,
}

impl Cuts {
    /// The slices of a model.
    pub(crate) fn ranges(&self, shape: &ModelShape) -> Result<Vec<LayerRange>, LayerRangeError> {
        match self {
            Self::At(cuts) => LayerRange::from_cuts(cuts, shape.n_layer()),
            Self::Every => Ok(shape.finest_split()),
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
}
