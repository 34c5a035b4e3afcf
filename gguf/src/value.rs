//! Metadata values: GGUF's whole value model, with strings kept as the bytes they are.
//!
//! Knows nothing of what a key means.

/// The type code of a value, as it stands in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs, reason = "each is the type it names")]
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    /// The type with this code.
    pub const fn from_code(code: u32) -> Option<Self> {
        Some(match code {
            0 => Self::U8,
            1 => Self::I8,
            2 => Self::U16,
            3 => Self::I16,
            4 => Self::U32,
            5 => Self::I32,
            6 => Self::F32,
            7 => Self::Bool,
            8 => Self::String,
            9 => Self::Array,
            10 => Self::U64,
            11 => Self::I64,
            12 => Self::F64,
            _ => return None,
        })
    }

    /// Its name, for messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::F32 => "f32",
            Self::Bool => "bool",
            Self::String => "string",
            Self::Array => "array",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F64 => "f64",
        }
    }

    /// The fewest bytes an element of this type takes in a file.
    pub(crate) const fn least_bytes(self) -> u64 {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::String => 8,
            Self::Array => 12,
        }
    }
}

/// A metadata value. Strings are bytes: the format says UTF-8, but vocabularies in the wild are not always.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "each holds the type it names")]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(Vec<u8>),
    Array(Array),
}

/// An array of values of one type.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "each holds the type it names")]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    String(Vec<Vec<u8>>),
    Array(Vec<Array>),
}

/// Runs one expression on the vector of whichever variant an [`Array`] is.
macro_rules! each_array {
    ($array:expr, $items:ident => $body:expr) => {
        match $array {
            Array::U8($items) => $body,
            Array::I8($items) => $body,
            Array::U16($items) => $body,
            Array::I16($items) => $body,
            Array::U32($items) => $body,
            Array::I32($items) => $body,
            Array::U64($items) => $body,
            Array::I64($items) => $body,
            Array::F32($items) => $body,
            Array::F64($items) => $body,
            Array::Bool($items) => $body,
            Array::String($items) => $body,
            Array::Array($items) => $body,
        }
    };
}

impl Value {
    /// A string value.
    pub fn string(text: impl Into<String>) -> Self {
        Self::String(text.into().into_bytes())
    }

    /// Its type.
    pub const fn value_type(&self) -> ValueType {
        match self {
            Self::U8(_) => ValueType::U8,
            Self::I8(_) => ValueType::I8,
            Self::U16(_) => ValueType::U16,
            Self::I16(_) => ValueType::I16,
            Self::U32(_) => ValueType::U32,
            Self::I32(_) => ValueType::I32,
            Self::U64(_) => ValueType::U64,
            Self::I64(_) => ValueType::I64,
            Self::F32(_) => ValueType::F32,
            Self::F64(_) => ValueType::F64,
            Self::Bool(_) => ValueType::Bool,
            Self::String(_) => ValueType::String,
            Self::Array(_) => ValueType::Array,
        }
    }

    /// The text, if this is a string of valid UTF-8.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(bytes) => std::str::from_utf8(bytes).ok(),
            _ => None,
        }
    }

    /// The array, if this is one.
    pub const fn as_array(&self) -> Option<&Array> {
        match self {
            Self::Array(array) => Some(array),
            _ => None,
        }
    }

    /// The number, if this is an integer that is not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U8(n) => Some(n.into()),
            Self::U16(n) => Some(n.into()),
            Self::U32(n) => Some(n.into()),
            Self::U64(n) => Some(n),
            Self::I8(n) => n.try_into().ok(),
            Self::I16(n) => n.try_into().ok(),
            Self::I32(n) => n.try_into().ok(),
            Self::I64(n) => n.try_into().ok(),
            _ => None,
        }
    }

    /// The number, if this is a float.
    pub const fn as_f32(&self) -> Option<f32> {
        match *self {
            Self::F32(x) => Some(x),
            Self::F64(x) => Some(x as f32),
            _ => None,
        }
    }
}

impl Array {
    /// Number of elements.
    pub fn len(&self) -> usize {
        each_array!(self, items => items.len())
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The type of its elements.
    pub const fn element_type(&self) -> ValueType {
        match self {
            Self::U8(_) => ValueType::U8,
            Self::I8(_) => ValueType::I8,
            Self::U16(_) => ValueType::U16,
            Self::I16(_) => ValueType::I16,
            Self::U32(_) => ValueType::U32,
            Self::I32(_) => ValueType::I32,
            Self::U64(_) => ValueType::U64,
            Self::I64(_) => ValueType::I64,
            Self::F32(_) => ValueType::F32,
            Self::F64(_) => ValueType::F64,
            Self::Bool(_) => ValueType::Bool,
            Self::String(_) => ValueType::String,
            Self::Array(_) => ValueType::Array,
        }
    }

    /// The elements as numbers that are not negative (a bool is 0 or 1), if all are.
    pub fn as_u64s(&self) -> Option<Vec<u64>> {
        match self {
            Self::U8(items) => Some(items.iter().map(|&n| n.into()).collect()),
            Self::U16(items) => Some(items.iter().map(|&n| n.into()).collect()),
            Self::U32(items) => Some(items.iter().map(|&n| n.into()).collect()),
            Self::U64(items) => Some(items.clone()),
            Self::I8(items) => items.iter().map(|&n| n.try_into().ok()).collect(),
            Self::I16(items) => items.iter().map(|&n| n.try_into().ok()).collect(),
            Self::I32(items) => items.iter().map(|&n| n.try_into().ok()).collect(),
            Self::I64(items) => items.iter().map(|&n| n.try_into().ok()).collect(),
            Self::Bool(items) => Some(items.iter().map(|&b| b.into()).collect()),
            Self::F32(_) | Self::F64(_) | Self::String(_) | Self::Array(_) => None,
        }
    }

    /// Elements `[start, end)`; fewer where the array is shorter.
    #[must_use]
    pub fn slice(&self, start: usize, end: usize) -> Self {
        macro_rules! part {
            ($($variant:ident),*) => {
                match self {
                    $(Self::$variant(items) => {
                        let end = end.min(items.len());
                        Self::$variant(items[start.min(end)..end].to_vec())
                    })*
                }
            };
        }
        part!(U8, I8, U16, I16, U32, I32, U64, I64, F32, F64, Bool, String, Array)
    }
}

impl From<u32> for Value {
    fn from(n: u32) -> Self {
        Self::U32(n)
    }
}

impl From<f32> for Value {
    fn from(x: f32) -> Self {
        Self::F32(x)
    }
}

impl From<bool> for Value {
    fn from(b: bool) -> Self {
        Self::Bool(b)
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::string(text)
    }
}

impl From<Array> for Value {
    fn from(array: Array) -> Self {
        Self::Array(array)
    }
}
