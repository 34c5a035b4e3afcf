//! Names of the parts of a split model, as llama.cpp writes them (`llama_split_path`): pure name work.

/// A file name of the form `stem-00002-of-00003.gguf`, taken apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PartName<'a> {
    pub(crate) stem: &'a str,
    pub(crate) number: u32,
    pub(crate) count: u32,
}

/// The most parts a name can count, five digits.
const MAX_PARTS: u32 = 99_999;

/// The file names of all parts, in order, of the split model that `file_name` (without its folder) is a part of.
///
/// `None` where the name is not one of a part.
pub fn sibling_names(file_name: &str) -> Option<Vec<String>> {
    let part = part_name(file_name)?;
    Some((1..=part.count).map(|number| name_of(part.stem, number, part.count)).collect())
}

/// The file name of part `number` (from 1) of `count`.
pub fn name_of(stem: &str, number: u32, count: u32) -> String {
    format!("{stem}-{number:05}-of-{count:05}.gguf")
}

pub(crate) fn part_name(file_name: &str) -> Option<PartName<'_>> {
    let base = file_name.rsplit(['/', '\\']).next().unwrap_or(file_name);
    let (rest, count) = base.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let (number, count) = (five_digits(number)?, five_digits(count)?);
    (1..=count).contains(&number).then_some(PartName { stem, number, count })
}

fn five_digits(text: &str) -> Option<u32> {
    let digits = text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    if digits { text.parse().ok().filter(|n| *n <= MAX_PARTS) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_any_part_gives_the_names_of_all() {
        let names = sibling_names("m.Q4-00002-of-00003.gguf").unwrap();
        let wanted = ["m.Q4-00001-of-00003.gguf", "m.Q4-00002-of-00003.gguf", "m.Q4-00003-of-00003.gguf"];
        assert_eq!(names, wanted);
    }

    #[test]
    fn other_names_are_no_parts() {
        for name in [
            "model.gguf",
            "model-00004-of-00003.gguf",
            "model-00000-of-00003.gguf",
            "model-1-of-3.gguf",
            "model-00001-of-00003.bin",
            "-of-.gguf",
            "model-0000a-of-00003.gguf",
            "",
        ] {
            assert_eq!(sibling_names(name), None, "{name}");
        }
    }
}
