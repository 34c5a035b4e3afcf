//! Joins the parts of a split model, given in any order, into one, after checking that they are one.

use std::collections::HashSet;

use super::part::{Entry, PartContents};
use crate::error::{Error, SplitError};
use crate::split::{name_of, part_name};
use crate::{Part, Value};

/// Keys of a split (`llama-quant.cpp`, `gguf-split`).
const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";

/// Parts in order, and what they say together.
pub(super) struct Joined {
    pub(super) parts: Vec<Part>,
    pub(super) contents: PartContents,
}

/// A part with its number, from 0.
struct Numbered {
    number: u64,
    part: Part,
    contents: PartContents,
}

pub(super) fn join(parts: Vec<Part>, contents: Vec<PartContents>) -> Result<Joined, Error> {
    let given = parts.len();
    let all: Vec<(Part, PartContents)> = parts.into_iter().zip(contents).collect();
    let first = all.first().ok_or(SplitError::NoParts)?;
    let count = number(&first.1, COUNT).unwrap_or(1).max(1);
    if given == 1 && count == 1 {
        let (part, mut contents) = all.into_iter().next().ok_or(SplitError::NoParts)?;
        contents.entries.retain(|entry| !is_split_key(&entry.key));
        return Ok(Joined { parts: vec![part], contents });
    }
    let mut numbered = number_parts(all)?;
    numbered.sort_by_key(|part| part.number);
    check_all_there(&numbered, count)?;
    check_same_model(&numbered)?;
    Ok(merge(numbered)?)
}

fn number_parts(all: Vec<(Part, PartContents)>) -> Result<Vec<Numbered>, SplitError> {
    let given = all.len();
    let mut numbered = Vec::with_capacity(given);
    for (part, contents) in all {
        let not_a_part = |field| SplitError::NotAPart { file: part.name.clone(), field, given };
        let number = number(&contents, NUMBER).ok_or_else(|| not_a_part(NUMBER))?;
        let count = self::number(&contents, COUNT).ok_or_else(|| not_a_part(COUNT))?;
        if number >= count {
            let file = part.name.clone();
            return Err(SplitError::Number { file, number: number.saturating_add(1), count });
        }
        numbered.push(Numbered { number, part, contents });
    }
    Ok(numbered)
}

/// Every number from 0 to `count` once; the parts are sorted by number.
fn check_all_there(parts: &[Numbered], count: u64) -> Result<(), SplitError> {
    for pair in parts.windows(2) {
        if number(&pair[0].contents, COUNT) != number(&pair[1].contents, COUNT) {
            return Err(foreign(&pair[1], &pair[0], COUNT));
        }
        if pair[0].number == pair[1].number {
            return Err(SplitError::Duplicated {
                first: pair[0].part.name.clone(),
                second: pair[1].part.name.clone(),
                number: pair[0].number + 1,
            });
        }
    }
    let missing =
        (0..count).find(|number| parts.get(*number as usize).map(|part| part.number) != Some(*number));
    match (missing, parts.first()) {
        (Some(number), Some(some)) => Err(SplitError::Missing {
            file: some.part.name.clone(),
            count,
            missing: describe(&some.part, number, count),
        }),
        _ => Ok(()),
    }
}

/// `2 (model-00002-of-00003.gguf)`, or just the number where the files are not named as parts.
fn describe(sibling: &Part, number: u64, count: u64) -> String {
    let number = number + 1;
    let name = part_name(&sibling.name)
        .and_then(|name| Some(name_of(name.stem, u32::try_from(number).ok()?, u32::try_from(count).ok()?)));
    name.map_or_else(|| number.to_string(), |name| format!("{number} ({name})"))
}

/// Nothing that the parts say twice may differ, nor may their names.
fn check_same_model(parts: &[Numbered]) -> Result<(), SplitError> {
    let Some((first, rest)) = parts.split_first() else { return Ok(()) };
    let stem = part_name(&first.part.name).map(|name| name.stem.to_owned());
    for part in rest {
        let other = part_name(&part.part.name).map(|name| name.stem.to_owned());
        if stem.is_some() && other.is_some() && stem != other {
            return Err(foreign(part, first, "file name"));
        }
        for entry in part.contents.entries.iter().filter(|entry| entry.key != NUMBER) {
            let same = find(&first.contents.entries, &entry.key).is_none_or(|value| *value == entry.value);
            if !same {
                return Err(foreign(part, first, &entry.key));
            }
        }
        if part.contents.version != first.contents.version {
            return Err(foreign(part, first, "version"));
        }
    }
    Ok(())
}

fn merge(numbered: Vec<Numbered>) -> Result<Joined, SplitError> {
    let mut parts = Vec::with_capacity(numbered.len());
    let mut joined: Option<PartContents> = None;
    let mut names = HashSet::new();
    for (index, Numbered { part, mut contents, .. }) in numbered.into_iter().enumerate() {
        for tensor in &mut contents.tensors {
            tensor.part = index;
            if !names.insert(tensor.name.clone()) {
                return Err(SplitError::Foreign {
                    file: part.name.clone(),
                    other: parts.first().map_or_else(String::new, |first: &Part| first.name.clone()),
                    field: format!("tensor {:?} is in both, so one of them", tensor.name),
                });
            }
        }
        parts.push(part);
        match &mut joined {
            None => joined = Some(contents),
            Some(joined) => joined.tensors.append(&mut contents.tensors),
        }
    }
    let mut contents = joined.ok_or(SplitError::NoParts)?;
    let found = contents.tensors.len() as u64;
    let declared = number(&contents, TENSORS).unwrap_or(found);
    if declared != found {
        let file = parts.first().map_or_else(String::new, |part| part.name.clone());
        return Err(SplitError::TensorCount { file, declared, found });
    }
    contents.entries.retain(|entry| !is_split_key(&entry.key));
    Ok(Joined { parts, contents })
}

fn foreign(part: &Numbered, other: &Numbered, field: &str) -> SplitError {
    SplitError::Foreign {
        file: part.part.name.clone(),
        other: other.part.name.clone(),
        field: field.to_owned(),
    }
}

fn number(contents: &PartContents, key: &str) -> Option<u64> {
    find(&contents.entries, key).and_then(Value::as_u64)
}

fn find<'a>(entries: &'a [Entry], key: &str) -> Option<&'a Value> {
    entries.iter().find(|entry| entry.key == key).map(|entry| &entry.value)
}

fn is_split_key(key: &str) -> bool {
    matches!(key, NUMBER | COUNT | TENSORS)
}
