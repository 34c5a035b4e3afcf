//! Typed access to the metadata of one architecture: `block_count` of a llama model is `llama.block_count`.

use crate::error::{Error, ModelFault};
use crate::{Gguf, Value};

/// The metadata of a model under its architecture's prefix.
#[derive(Clone, Copy)]
pub(crate) struct Keys<'a> {
    gguf: &'a Gguf,
    architecture: &'a str,
}

impl<'a> Keys<'a> {
    pub(crate) fn new(gguf: &'a Gguf) -> Result<Self, Error> {
        Ok(Self { gguf, architecture: gguf.architecture()? })
    }

    /// The full key.
    pub(crate) fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.gguf.get(&self.full(key))
    }

    /// An integer that fits u32, if the key is there.
    pub(crate) fn u32(&self, key: &str) -> Result<Option<u32>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64() {
            Some(n) => u32::try_from(n).map(Some).map_err(|_| self.out_of_range(key, n, 0, u32::MAX)),
            None => Err(self.wrong_type(key, value, "integer that is not negative")),
        }
    }

    pub(crate) fn required_u32(&self, key: &str) -> Result<u32, Error> {
        self.u32(key)?.ok_or_else(|| self.missing(key))
    }

    /// An integer from `least` to `most`.
    pub(crate) fn u32_in(&self, key: &str, least: u32, most: u32) -> Result<u32, Error> {
        let n = self.required_u32(key)?;
        if (least..=most).contains(&n) { Ok(n) } else { Err(self.out_of_range(key, n.into(), least, most)) }
    }

    pub(crate) fn f32(&self, key: &str) -> Result<Option<f32>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_f32().map(Some).ok_or_else(|| self.wrong_type(key, value, "float"))
    }

    /// One number for each of `n` blocks, from an array of that length or from a single number for all.
    pub(crate) fn per_block(&self, key: &str, n: u32) -> Result<Option<Vec<u32>>, Error> {
        let Some(Value::Array(array)) = self.get(key) else {
            return Ok(self.u32(key)?.map(|number| vec![number; n as usize]));
        };
        if array.len() != n as usize {
            let fault = ModelFault::ArrayLength { found: array.len(), wanted: n as usize };
            return Err(self.fault(key, fault));
        }
        let wrong = || {
            let fault = ModelFault::WrongType {
                found: array.element_type().name(),
                wanted: "integers that are not negative",
            };
            self.fault(key, fault)
        };
        let numbers = array.as_u64s().ok_or_else(wrong)?;
        let narrow = |n: u64| u32::try_from(n).map_err(|_| self.out_of_range(key, n, 0, u32::MAX));
        numbers.into_iter().map(narrow).collect::<Result<Vec<_>, _>>().map(Some)
    }

    pub(crate) fn missing(&self, key: &str) -> Error {
        self.fault(key, ModelFault::Missing)
    }

    pub(crate) fn out_of_range(&self, key: &str, value: u64, least: u32, most: u32) -> Error {
        let (least, most) = (least.into(), most.into());
        self.fault(key, ModelFault::OutOfRange { value, least, most })
    }

    pub(crate) fn fault(&self, key: &str, fault: ModelFault) -> Error {
        self.gguf.model_fault(self.full(key), fault)
    }

    fn wrong_type(&self, key: &str, value: &Value, wanted: &'static str) -> Error {
        self.fault(key, ModelFault::WrongType { found: value.value_type().name(), wanted })
    }
}
