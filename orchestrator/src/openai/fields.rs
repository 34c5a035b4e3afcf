//! Reads a JSON object field by field, so that every refusal names the parameter, and what nobody asked for is refused
//! rather than ignored.
//!
//! Knows nothing of what the fields mean.

use std::fmt::Display;
use std::ops::RangeInclusive;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::error::ApiError;

/// Long enough for any real parameter; a client may send a megabyte as a name or value, which no error repeats.
const QUOTED_CHARS: usize = 120;

/// The fields of an object that have not been read yet. `null` counts as absent, as OpenAI's clients send it for
/// what they leave out.
#[derive(Debug)]
pub(crate) struct Fields {
    path: String,
    map: Map<String, Value>,
}

/// A parameter that is known and has no effect here, so that only values which ask for none are accepted.
pub(crate) struct Inert {
    /// Its name.
    pub(crate) name: &'static str,
    /// Whether a value asks for nothing.
    pub(crate) is_neutral: fn(&Value) -> bool,
    /// Why it is not supported, or what to use instead.
    pub(crate) reason: &'static str,
}

impl Fields {
    /// Fields of an object at `path`, which is empty for the body itself.
    pub(crate) fn of(value: Value, path: impl Into<String>) -> Result<Self, ApiError> {
        let path = path.into();
        match value {
            Value::Object(map) => Ok(Self { path, map }),
            _ if path.is_empty() => Err(ApiError::BodyNotJson { reason: "an object is expected".into() }),
            _ => Err(ApiError::invalid(path, "an object is expected")),
        }
    }

    /// The full name of a field.
    pub(crate) fn param(&self, name: &str) -> String {
        let name = quoted(name);
        if self.path.is_empty() { name } else { format!("{}.{name}", self.path) }
    }

    /// Takes a field, of whatever type.
    pub(crate) fn take_value(&mut self, name: &str) -> Option<Value> {
        // Not `swap_remove`: the first unknown field is the one that is reported.
        self.map.shift_remove(name).filter(|value| !value.is_null())
    }

    /// Takes a field.
    pub(crate) fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, ApiError> {
        let Some(value) = self.take_value(name) else { return Ok(None) };
        let parsed = serde_json::from_value(value);
        parsed.map(Some).map_err(|e| ApiError::invalid(self.param(name), quoted(&e.to_string())))
    }

    /// Takes a field that must be there.
    pub(crate) fn require<T: DeserializeOwned>(&mut self, name: &str) -> Result<T, ApiError> {
        self.take(name)?.ok_or_else(|| ApiError::Missing { param: self.param(name) })
    }

    /// Takes a number within a range.
    pub(crate) fn take_within<T>(
        &mut self,
        name: &str,
        range: RangeInclusive<T>,
    ) -> Result<Option<T>, ApiError>
    where
        T: DeserializeOwned + PartialOrd + Display,
    {
        match self.take::<T>(name)? {
            Some(value) if !range.contains(&value) => {
                let reason = format!("{value} is not between {} and {}", range.start(), range.end());
                Err(ApiError::invalid(self.param(name), reason))
            }
            value => Ok(value),
        }
    }

    /// Takes fields that carry information for others, whatever they hold.
    pub(crate) fn pass_over(&mut self, names: &[&str]) {
        for name in names {
            self.map.shift_remove(*name);
        }
    }

    /// Takes fields that have no effect, and refuses the first that asks for one.
    pub(crate) fn take_inert(&mut self, inert: &[Inert]) -> Result<(), ApiError> {
        for Inert { name, is_neutral, reason } in inert {
            if self.take_value(name).is_some_and(|value| !is_neutral(&value)) {
                return Err(ApiError::unsupported(self.param(name), *reason));
            }
        }
        Ok(())
    }

    /// Refuses the first field that is left.
    pub(crate) fn finish(self) -> Result<(), ApiError> {
        match self.map.keys().next() {
            Some(name) => Err(ApiError::UnknownParameter { param: self.param(name) }),
            None => Ok(()),
        }
    }
}

/// Takes an array's items with their paths, e.g. `messages[3]`.
pub(crate) fn items(value: Value, path: &str) -> Result<impl Iterator<Item = (String, Value)>, ApiError> {
    match value {
        Value::Array(values) => {
            let path = path.to_owned();
            Ok(values.into_iter().enumerate().map(move |(i, value)| (format!("{path}[{i}]"), value)))
        }
        _ => Err(ApiError::invalid(path, "an array is expected")),
    }
}

/// The client's words, short enough to be repeated.
pub(crate) fn quoted(text: &str) -> String {
    match text.char_indices().nth(QUOTED_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(value: Value) -> Fields {
        Fields::of(value, "").unwrap()
    }

    #[test]
    fn a_field_of_another_type_is_named() {
        let error = fields(json!({ "top_k": "many" })).take::<i32>("top_k").unwrap_err();
        assert_eq!(error.param(), Some("top_k"));
        assert!(error.to_string().contains("expected i32"), "{error}");
    }

    #[test]
    fn null_is_absent() {
        let mut fields = fields(json!({ "top_k": null }));
        assert_eq!(fields.take::<i32>("top_k").unwrap(), None);
        assert_eq!(fields.finish(), Ok(()));
    }

    #[test]
    fn fields_nobody_took_are_refused_by_name() {
        let nested = Fields::of(json!({ "role": "user", "colour": 1 }), "messages[2]").unwrap();
        assert_eq!(nested.finish().unwrap_err().param(), Some("messages[2].role"));
        assert_eq!(fields(json!({ "a": null })).finish().unwrap_err().param(), Some("a"));
    }

    #[test]
    fn inert_fields_are_accepted_only_where_they_ask_for_nothing() {
        let inert = [Inert { name: "n", is_neutral: |v| v == 1, reason: "one choice" }];
        let mut neutral = fields(json!({ "n": 1 }));
        assert_eq!(neutral.take_inert(&inert), Ok(()));
        assert_eq!(neutral.finish(), Ok(()));
        assert_eq!(
            fields(json!({ "n": 2 })).take_inert(&inert).unwrap_err(),
            ApiError::unsupported("n", "one choice")
        );
    }

    #[test]
    fn a_huge_name_is_not_repeated_whole() {
        let name = "é".repeat(1_000_000);
        let error = fields(json!({ name: 1 })).finish().unwrap_err();
        assert!(error.to_string().len() < 1000);
    }

    #[test]
    fn a_number_out_of_range_is_refused_with_the_range() {
        let error = fields(json!({ "top_p": 1.5 })).take_within("top_p", 0.0..=1.0_f32).unwrap_err();
        assert_eq!(error.to_string(), "`top_p`: 1.5 is not between 0 and 1");
    }
}
