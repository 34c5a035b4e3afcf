//! Makes a JSON schema fit for llama.cpp's conversion to a grammar, or refuses it.
//!
//! The conversion (common/json-schema.cpp, common/json-schema-to-grammar.cpp) trusts its input: it recurses for ever
//! on an object that names itself through `allOf`, doubles its work with each level of repeated types or `allOf`, and
//! overflows the stack on long names. [`prepare`] walks a schema as the conversion would and stops where that
//! becomes unreasonable. What is merely wrong in a schema is left to llama.cpp to report.

use std::collections::HashSet;

use serde_json::{Map, Value};

/// Most schemas visited, references followed: OpenAI allows 5,000 properties.
const MAX_NODES: usize = 10_000;

/// Deepest chain of schemas, references followed: OpenAI allows 10 levels.
const MAX_DEPTH: usize = 100;

/// Longest property name, in bytes: 8,000 special characters in a row overflow std::regex on a stack of 2 MiB.
const MAX_NAME: usize = 256;

/// Longest `$ref`, in bytes, for the same reason.
const MAX_REF: usize = 1024;

/// Most optional properties of one object: the conversion's work grows with the cube of their number.
const MAX_OPTIONAL: usize = 300;

/// Most `pattern`s: the conversion copies all its rules for each.
const MAX_PATTERNS: usize = 200;

/// Longest pattern, in bytes: llama.cpp prints those that it cannot convert to stderr.
const MAX_PATTERN: usize = 1024;

/// Longest schema, in bytes of JSON.
const MAX_BYTES: usize = 512 << 10;

/// Bytes of rule names, which are made of the names on the way from the root.
const MAX_RULE_NAME_BYTES: usize = 4 << 20;

/// Why a schema is refused before llama.cpp sees it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum SchemaError {
    #[error("the schema has {got} bytes, more than {MAX_BYTES}")]
    Bytes { got: usize },
    #[error("the schema has more than {MAX_NODES} parts once references and repeated types are expanded")]
    Nodes,
    #[error("the schema nests deeper than {MAX_DEPTH} levels, or an object contains itself through `allOf`")]
    Depth,
    #[error("a property name has {got} bytes, more than {MAX_NAME}")]
    Name { got: usize },
    #[error(
        "the names on the way to the schema's properties add up to more than {MAX_RULE_NAME_BYTES} bytes"
    )]
    Names,
    #[error("a `$ref` has {got} bytes, more than {MAX_REF}")]
    Ref { got: usize },
    #[error("an object has {got} optional properties, more than {MAX_OPTIONAL}")]
    Optional { got: usize },
    #[error("the schema has more than {MAX_PATTERNS} patterns")]
    Patterns,
    #[error("a pattern has more than {MAX_PATTERN} bytes or control characters")]
    Pattern,
}

/// The schema to hand to llama.cpp: `schema` with every `allOf` of one schema replaced by that schema, which means
/// the same and is how generators write a reference with a description.
pub(crate) fn prepare(mut schema: Value) -> Result<Value, SchemaError> {
    unwrap_single_all_of(&mut schema);
    let got = schema.to_string().len();
    if got > MAX_BYTES {
        return Err(SchemaError::Bytes { got });
    }
    let mut walk = Walk { root: &schema, followed: HashSet::new(), nodes: 0, patterns: 0, name_bytes: 0 };
    walk.visit(&schema, At { depth: 0, name: 0 })?;
    Ok(schema)
}

/// Recurses no deeper than the `Value` itself, whose depth the JSON parser limits.
fn unwrap_single_all_of(schema: &mut Value) {
    match schema {
        Value::Array(items) => items.iter_mut().for_each(unwrap_single_all_of),
        Value::Object(fields) => {
            fields.values_mut().for_each(unwrap_single_all_of);
            let shapes = ["properties", "$ref", "anyOf", "oneOf", "additionalProperties"];
            if shapes.iter().any(|key| fields.contains_key(*key)) {
                return;
            }
            if let Some(Value::Array(all)) = fields.get_mut("allOf")
                && all.len() == 1
                && all[0].is_object()
            {
                let mut only = all[0].take();
                // A schema's definitions are looked up from its root.
                for key in ["$defs", "definitions"] {
                    if let (Some(kept), Some(target)) = (fields.remove(key), only.as_object_mut()) {
                        target.entry(key).or_insert(kept);
                    }
                }
                *schema = only;
            }
        }
        _ => {}
    }
}

/// Where the walk is.
#[derive(Debug, Clone, Copy)]
struct At {
    depth: usize,
    /// Bytes of the names on the way here.
    name: usize,
}

impl At {
    fn below(self, name: usize) -> Self {
        Self { depth: self.depth + 1, name: self.name + name }
    }
}

struct Walk<'a> {
    root: &'a Value,
    followed: HashSet<&'a str>,
    nodes: usize,
    patterns: usize,
    name_bytes: usize,
}

impl<'a> Walk<'a> {
    fn visit(&mut self, schema: &'a Value, at: At) -> Result<(), SchemaError> {
        self.count(at)?;
        let Some(fields) = schema.as_object() else { return Ok(()) };
        if let Some(reference) = fields.get("$ref") {
            return self.follow(reference, at);
        }
        if let Some(alternatives) = fields.get("oneOf").or_else(|| fields.get("anyOf")) {
            return self.visit_all(alternatives, at.below(2));
        }
        if let Some(Value::Array(types)) = fields.get("type") {
            // The conversion makes a schema of each type.
            for kind in types {
                self.count(at.below(2))?;
                self.visit_typed(fields, kind.as_str(), at.below(2))?;
            }
            return Ok(());
        }
        self.visit_typed(fields, fields.get("type").and_then(Value::as_str), at)
    }

    fn visit_typed(
        &mut self,
        fields: &'a Map<String, Value>,
        kind: Option<&str>,
        at: At,
    ) -> Result<(), SchemaError> {
        if fields.contains_key("const") || fields.contains_key("enum") {
            return Ok(());
        }
        let is_shaped = fields.contains_key("properties")
            || fields.get("additionalProperties").is_some_and(|more| *more != Value::Bool(true));
        let all_of = fields.get("allOf");
        match (kind, all_of) {
            (None | Some("object"), _) if is_shaped => self.visit_object(fields, at),
            (None | Some("object" | "string"), Some(all)) => self.visit_all_of(all, at),
            (None | Some("array"), _) => {
                self.count_pattern(fields)?;
                let items = fields.get("items").or_else(|| fields.get("prefixItems"));
                items.map_or(Ok(()), |items| match items {
                    Value::Array(_) => self.visit_all(items, at.below(8)),
                    item => self.visit(item, at.below(4)),
                })
            }
            _ => self.count_pattern(fields),
        }
    }

    fn visit_all(&mut self, schemas: &'a Value, at: At) -> Result<(), SchemaError> {
        schemas.as_array().into_iter().flatten().try_for_each(|schema| self.visit(schema, at))
    }

    fn visit_object(&mut self, fields: &'a Map<String, Value>, at: At) -> Result<(), SchemaError> {
        let required = fields.get("required").and_then(Value::as_array).map_or(0, Vec::len);
        let properties = fields.get("properties").and_then(Value::as_object);
        let optional = properties.map_or(0, Map::len).saturating_sub(required);
        if optional > MAX_OPTIONAL {
            return Err(SchemaError::Optional { got: optional });
        }
        for (name, schema) in properties.into_iter().flatten() {
            if name.len() > MAX_NAME {
                return Err(SchemaError::Name { got: name.len() });
            }
            self.visit(schema, at.below(name.len() + 1))?;
        }
        fields.get("additionalProperties").map_or(Ok(()), |more| self.visit(more, at.below(16)))
    }

    /// The conversion visits the parts once to read them, and again, without remembering references, to merge them.
    fn visit_all_of(&mut self, parts: &'a Value, at: At) -> Result<(), SchemaError> {
        self.visit_all(parts, at.below(2))?;
        for part in parts.as_array().into_iter().flatten() {
            match part.get("oneOf").or_else(|| part.get("anyOf")).and_then(Value::as_array) {
                Some(alternatives) => {
                    alternatives.iter().try_for_each(|alternative| self.merge(alternative, at.below(0)))?;
                }
                None => self.merge(part, at.below(0))?,
            }
        }
        Ok(())
    }

    fn merge(&mut self, part: &'a Value, at: At) -> Result<(), SchemaError> {
        self.count(at)?;
        if let Some(reference) = part.get("$ref").and_then(Value::as_str) {
            return self.resolve(reference).map_or(Ok(()), |target| self.merge(target, at.below(0)));
        }
        part.as_object().map_or(Ok(()), |fields| self.visit_object(fields, at))
    }

    fn follow(&mut self, reference: &'a Value, at: At) -> Result<(), SchemaError> {
        let Some(reference) = reference.as_str() else { return Ok(()) };
        if reference.len() > MAX_REF {
            return Err(SchemaError::Ref { got: reference.len() });
        }
        if !self.followed.insert(reference) {
            return Ok(());
        }
        // The rule of a referenced schema is named after the reference.
        let at = At { depth: at.depth + 1, name: reference.len() };
        self.resolve(reference).map_or(Ok(()), |target| self.visit(target, at))
    }

    /// As common_chat_schema_builder::resolve_ref does it: no percent or tilde escapes.
    fn resolve(&self, reference: &str) -> Option<&'a Value> {
        reference.strip_prefix("#/")?.split('/').try_fold(self.root, |target, part| match target {
            Value::Object(fields) => fields.get(part),
            Value::Array(items) => items.get(part.parse::<usize>().ok()?),
            _ => None,
        })
    }

    fn count(&mut self, at: At) -> Result<(), SchemaError> {
        self.nodes += 1;
        self.name_bytes += at.name;
        if self.nodes > MAX_NODES {
            return Err(SchemaError::Nodes);
        }
        if at.depth > MAX_DEPTH {
            return Err(SchemaError::Depth);
        }
        if self.name_bytes > MAX_RULE_NAME_BYTES {
            return Err(SchemaError::Names);
        }
        Ok(())
    }

    fn count_pattern(&mut self, fields: &Map<String, Value>) -> Result<(), SchemaError> {
        let Some(pattern) = fields.get("pattern").and_then(Value::as_str) else { return Ok(()) };
        if pattern.len() > MAX_PATTERN || pattern.chars().any(char::is_control) {
            return Err(SchemaError::Pattern);
        }
        self.patterns += 1;
        if self.patterns > MAX_PATTERNS { Err(SchemaError::Patterns) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_ordinary_schema_passes_unchanged() {
        let schema = json!({
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 80},
                "tags": {"type": "array", "items": {"type": ["string", "null"]}},
                "child": {"$ref": "#"},
            },
            "required": ["name"],
        });
        assert_eq!(prepare(schema.clone()), Ok(schema));
    }

    #[test]
    fn an_object_inside_itself_through_all_of_is_refused() {
        // llama.cpp recurses until the stack ends.
        let part = json!({"$ref": "#/$defs/A"});
        let schema = json!({
            "$defs": {"A": {"type": "object", "properties": {"p": {"allOf": [part, part]}}}},
            "allOf": [part, part],
        });
        assert_eq!(prepare(schema), Err(SchemaError::Depth));
    }

    #[test]
    fn a_reference_wrapped_in_all_of_is_a_reference() {
        // How pydantic writes a field whose type is a model, and has a description or a default.
        let schema = json!({
            "$defs": {"A": {"type": "object", "properties": {
                "p": {"allOf": [{"$ref": "#/$defs/A"}], "default": null},
            }}},
            "allOf": [{"$ref": "#/$defs/A"}],
        });
        let prepared = prepare(schema).unwrap();
        assert_eq!(prepared["$defs"]["A"]["properties"]["p"], json!({"$ref": "#/$defs/A"}));
        assert_eq!(prepared["$ref"], json!("#/$defs/A"));
    }

    #[test]
    fn work_that_doubles_with_each_level_is_refused() {
        let mut types = json!({"type": "string"});
        for _ in 0..20 {
            types = json!({"type": ["object", "object"], "properties": {"p": types}});
        }
        assert_eq!(prepare(types), Err(SchemaError::Nodes));
        let mut definitions = Map::new();
        for level in 0..20 {
            let next = json!({"$ref": format!("#/$defs/A{}", level + 1)});
            let object = json!({"type": "object", "properties": {"p": {"allOf": [next, next]}}});
            definitions.insert(format!("A{level}"), object);
        }
        let schema = json!({"$defs": definitions, "allOf": [{"$ref": "#/$defs/A0"}, {"$ref": "#/$defs/A0"}]});
        assert_eq!(prepare(schema), Err(SchemaError::Nodes));
    }

    #[test]
    fn names_references_and_depth_are_bounded() {
        let name = "_".repeat(8000);
        assert_eq!(prepare(json!({"properties": {&name: {}}})), Err(SchemaError::Name { got: 8000 }));
        assert_eq!(prepare(json!({"$ref": format!("#/{name}")})), Err(SchemaError::Ref { got: 8002 }));
        let mut schema = json!({"type": "string"});
        for _ in 0..101 {
            schema = json!({"type": "array", "items": schema});
        }
        assert_eq!(prepare(schema), Err(SchemaError::Depth));
        assert_eq!(prepare(json!({"type": "string", "pattern": "^\u{1b}$"})), Err(SchemaError::Pattern));
        let many: Map<String, Value> = (0..301).map(|i| (format!("p{i}"), json!({}))).collect();
        assert_eq!(prepare(json!({"properties": many})), Err(SchemaError::Optional { got: 301 }));
    }
}
