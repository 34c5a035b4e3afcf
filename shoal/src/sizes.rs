//! Amounts and rates of data as people write them.

use cluster::{Bytes, BytesPerSecond};

/// `500MiB`, `2GB`, `17`.
pub(crate) fn parse_bytes(text: &str) -> Result<Bytes, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let number: f64 = digits.trim().parse().map_err(|_| format!("{text:?} is not a number of bytes"))?;
    let unit = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kib" => 1024.0,
        "m" | "mib" => 1024.0 * 1024.0,
        "g" | "gib" => 1024.0 * 1024.0 * 1024.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        unit => return Err(format!("{unit:?} is not a unit: use KiB, MiB or GiB, or KB, MB or GB")),
    };
    if !number.is_finite() || number < 0.0 {
        return Err(format!("{text:?} is not an amount of memory"));
    }
    Ok(Bytes((number * unit) as u64))
}

/// Below it nothing of use would arrive, and others would take silence for a fault.
const LEAST_RATE: u64 = 100_000;

/// `50MB/s`.
pub(crate) fn parse_rate(text: &str) -> Result<BytesPerSecond, String> {
    let Bytes(rate) = parse_bytes(text.trim().trim_end_matches("/s"))?;
    if rate < LEAST_RATE {
        return Err(format!("{text:?} is too slow: {} kB/s is the least", LEAST_RATE / 1000));
    }
    Ok(BytesPerSecond(rate as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_of_memory_have_units() {
        assert_eq!(parse_bytes("2GiB"), Ok(Bytes(2 << 30)));
        assert_eq!(parse_bytes("1.5 MiB"), Ok(Bytes(3 << 19)));
        assert_eq!(parse_bytes("17"), Ok(Bytes(17)));
        assert_eq!(parse_bytes("3MB"), Ok(Bytes(3_000_000)));
        for bad in ["", "GiB", "-1", "2 bananas", "nan"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn rates_are_amounts_per_second() {
        assert_eq!(parse_rate("50MB/s"), Ok(BytesPerSecond(5e7)));
        assert_eq!(parse_rate("1 MiB"), Ok(BytesPerSecond(1_048_576.0)));
        for bad in ["", "1", "fast", "1MB/h"] {
            assert!(parse_rate(bad).is_err(), "{bad}");
        }
    }
}
