//! What both generation routes accept, checked value by value: sampling, limits, stop strings, delivery.
//!
//! Every name that is accepted stands here, in `chat.rs` or in `completions.rs`; every other one is refused. Defaults
//! of the sampling parameters are llama-server's.

use protocol::sampling::{LogitBias, Sampling};
use serde::Deserialize;
use serde_json::Value;
use uuid::Uuid;

use super::error::ApiError;
use super::fields::{Fields, Inert, quoted};

/// More than any client was seen to send (OpenAI accepts 4); each costs a comparison per character.
const MAX_STOPS: usize = 16;
/// Text that may be held back waiting for a stop string, in bytes.
const MAX_STOP_LEN: usize = 512;
/// Each bias is applied at every token.
const MAX_LOGIT_BIASES: usize = 1024;

/// Names that belong to OpenAI's API or to llama-server's, have no effect here, and may only ask for none.
pub(crate) const INERT: &[Inert] = &[
    inert("n", |v| is_number(v, 1.0), "one choice is generated"),
    inert("best_of", |v| is_number(v, 1.0), "one choice is generated"),
    inert("store", is_false, "nothing is stored"),
    inert("service_tier", |v| v == "auto" || v == "default", "there is one tier"),
    inert("modalities", |v| *v == serde_json::json!(["text"]), "only text is generated"),
    inert("audio", never, "only text is generated"),
    inert("prediction", never, "predicted outputs are not used"),
    inert("web_search_options", never, "there is no web search"),
    inert("verbosity", |v| v == "medium", "say it in the prompt"),
    inert("functions", never, "use `tools`"),
    inert("function_call", never, "use `tool_choice`"),
    inert("n_predict", never, "use `max_tokens`"),
    inert("n_probs", |v| is_number(v, 0.0), "use `logprobs`"),
    inert("n_keep", |v| is_number(v, 0.0), "a generation ends at the slot's end, nothing is shifted"),
    inert("cache_prompt", |v| *v == Value::Bool(true), "a slot's common prefix is always reused"),
    inert("id_slot", |v| is_number(v, -1.0), "the engine chooses the slot"),
    inert("samplers", never, "the order of the samplers is fixed"),
    inert("typical_p", |v| is_number(v, 1.0), "not among the samplers here"),
    inert("typ_p", |v| is_number(v, 1.0), "not among the samplers here"),
    inert("top_n_sigma", |v| is_number(v, -1.0), "not among the samplers here"),
    inert("dynatemp_range", |v| is_number(v, 0.0), "not among the samplers here"),
    inert("dry_multiplier", |v| is_number(v, 0.0), "not among the samplers here"),
    inert("xtc_probability", |v| is_number(v, 0.0), "not among the samplers here"),
    inert("mirostat", |v| is_number(v, 0.0), "not among the samplers here"),
    inert("min_keep", |v| is_number(v, 0.0), "not among the samplers here"),
    inert("lora", |v| v.as_array().is_some_and(Vec::is_empty), "adapters are not loaded"),
    inert("chat_template", never, "the template is the model's own"),
    inert("continue_final_message", is_false, "every answer is a new message"),
    inert("return_tokens", is_false, "use `logprobs`"),
    inert("timings_per_token", is_false, "timings come at the end"),
    inert("return_progress", is_false, "progress is not reported"),
    inert("post_sampling_probs", is_false, "probabilities are the model's own"),
];

const fn inert(name: &'static str, is_neutral: fn(&Value) -> bool, reason: &'static str) -> Inert {
    Inert { name, is_neutral, reason }
}

const fn never(_: &Value) -> bool {
    false
}

fn is_false(value: &Value) -> bool {
    *value == Value::Bool(false)
}

fn is_number(value: &Value, number: f64) -> bool {
    value.as_f64() == Some(number)
}

/// What both routes share of a request.
#[derive(Debug, PartialEq)]
pub(crate) struct Common {
    /// As named by the client; the served one where it named none.
    pub(crate) model: Option<String>,
    /// How tokens are chosen, without the grammar.
    pub(crate) sampling: Sampling,
    /// As asked; to the slot's end where the client did not say.
    pub(crate) max_tokens: Option<u32>,
    /// The text ends before the first of these.
    pub(crate) stops: Vec<String>,
    /// Whole or streamed.
    pub(crate) delivery: Delivery,
    /// Go on past end-of-generation tokens.
    pub(crate) ignore_eos: bool,
}

/// How an answer is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// As one object.
    Whole,
    /// As server-sent events.
    Stream(UsageChunk),
}

/// Whether a stream ends with a chunk of token counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UsageChunk {
    /// `stream_options.include_usage`.
    Sent,
    /// The default.
    Omitted,
}

/// What the text must look like.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) enum Constraint {
    /// Anything.
    #[default]
    Free,
    /// JSON that a schema describes.
    Schema { schema: Value, origin: SchemaOrigin },
    /// A grammar in GBNF.
    Grammar(String),
}

/// The parameter that a schema came in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SchemaOrigin {
    ResponseFormat,
    JsonSchema,
}

impl Common {
    /// Takes the shared fields. `n_ctx` is the size of a slot.
    pub(crate) fn take(fields: &mut Fields, n_ctx: u32) -> Result<Self, ApiError> {
        // Information for others, accepted and not used: no request is remembered.
        fields.pass_over(&["user", "metadata", "safety_identifier", "prompt_cache_key"]);
        Ok(Self {
            model: fields.take("model")?,
            sampling: sampling(fields)?,
            max_tokens: max_tokens(fields, n_ctx)?,
            stops: stops(fields)?,
            delivery: delivery(fields)?,
            ignore_eos: fields.take("ignore_eos")?.unwrap_or(false),
        })
    }
}

fn sampling(fields: &mut Fields) -> Result<Sampling, ApiError> {
    let penalty = -2.0..=2.0_f32;
    Ok(Sampling {
        temperature: fields.take_within("temperature", 0.0..=2.0)?.unwrap_or(0.8),
        top_k: u32::try_from(fields.take_within("top_k", -1..=i32::MAX)?.unwrap_or(40))
            .ok()
            .filter(|&k| k > 0),
        // 0 asks for the most likely token alone, which the smallest number above 0 gives.
        top_p: fields.take_within("top_p", 0.0..=1.0)?.unwrap_or(0.95_f32).max(f32::MIN_POSITIVE),
        min_p: fields.take_within("min_p", 0.0..=1.0)?.unwrap_or(0.05),
        seed: seed(fields)?,
        repeat_penalty: fields.take_within("repeat_penalty", 0.01..=10.0)?.unwrap_or(1.0),
        repeat_last_n: u32::try_from(fields.take_within("repeat_last_n", -1..=i32::MAX)?.unwrap_or(64)).ok(),
        presence_penalty: fields.take_within("presence_penalty", penalty.clone())?.unwrap_or(0.0),
        frequency_penalty: fields.take_within("frequency_penalty", penalty)?.unwrap_or(0.0),
        logit_bias: logit_bias(fields)?,
        grammar: None,
    })
}

/// −1 and nothing are a seed of the server's choice, as in llama-server.
fn seed(fields: &mut Fields) -> Result<u64, ApiError> {
    let Some(value) = fields.take_value("seed") else { return Ok(random_seed()) };
    match (value.as_u64(), value.as_i64()) {
        (Some(seed), _) => Ok(seed),
        (None, Some(-1)) => Ok(random_seed()),
        (None, Some(seed)) => Ok(seed.cast_unsigned()),
        (None, None) => Err(ApiError::invalid("seed", "an integer of 64 bits is expected")),
    }
}

fn random_seed() -> u64 {
    Uuid::new_v4().as_u64_pair().0
}

/// OpenAI's object of token ids to biases, or llama-server's array of pairs; `false` forbids a token.
fn logit_bias(fields: &mut Fields) -> Result<Vec<LogitBias>, ApiError> {
    let pairs: Vec<(Value, Value)> = match fields.take_value("logit_bias") {
        None => Vec::new(),
        Some(Value::Object(map)) => map.into_iter().map(|(id, bias)| (id.into(), bias)).collect(),
        Some(list) => serde_json::from_value(list)
            .map_err(|_| ApiError::invalid("logit_bias", "an object of token ids to numbers is expected"))?,
    };
    if pairs.len() > MAX_LOGIT_BIASES {
        let reason = format!("{} entries are more than the limit of {MAX_LOGIT_BIASES}", pairs.len());
        return Err(ApiError::invalid("logit_bias", reason));
    }
    pairs.into_iter().map(|(id, bias)| one_bias(&id, &bias)).collect()
}

fn one_bias(id: &Value, bias: &Value) -> Result<LogitBias, ApiError> {
    let token = match id {
        Value::String(text) => text.parse().ok(),
        id => id.as_i64().and_then(|id| i32::try_from(id).ok()),
    };
    let invalid = |reason| ApiError::invalid(format!("logit_bias[{}]", quoted(&id.to_string())), reason);
    let token = token.ok_or_else(|| invalid("a token id is expected"))?;
    let bias = match bias {
        Value::Bool(false) => f64::NEG_INFINITY,
        bias => bias.as_f64().ok_or_else(|| invalid("a number is expected"))?,
    };
    if bias.is_finite() && bias.abs() > 100.0 {
        return Err(invalid("the bias is not between -100 and 100"));
    }
    Ok(LogitBias { token, bias: bias as f32 })
}

/// Where more is asked for than a slot holds, the client expects a context that is not there and is told; within it,
/// the generation ends with `length` at the slot's end.
fn max_tokens(fields: &mut Fields, n_ctx: u32) -> Result<Option<u32>, ApiError> {
    let mut take = |name| -> Result<Option<(&str, u32)>, ApiError> {
        let Some(asked) = fields.take::<i64>(name)? else { return Ok(None) };
        match u32::try_from(asked) {
            Ok(asked) if (1..=n_ctx).contains(&asked) => Ok(Some((name, asked))),
            _ if asked <= 0 => Err(ApiError::invalid(name, format!("{asked} is less than 1"))),
            _ => Err(ApiError::invalid(
                name,
                format!("{asked} tokens are more than a slot holds, which is {n_ctx}"),
            )),
        }
    };
    match (take("max_completion_tokens")?, take("max_tokens")?) {
        (Some((_, new)), Some((name, old))) if new != old => {
            Err(ApiError::invalid(name, format!("{old} contradicts `max_completion_tokens`, which is {new}")))
        }
        (new, old) => Ok(new.or(old).map(|(_, asked)| asked)),
    }
}

fn stops(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "a string or an array of strings is expected")]
    enum OneOrMany {
        One(String),
        Many(Vec<String>),
    }
    let stops = match fields.take("stop")? {
        None => Vec::new(),
        Some(OneOrMany::One(stop)) => vec![stop],
        Some(OneOrMany::Many(stops)) => stops,
    };
    if stops.len() > MAX_STOPS {
        let reason = format!("{} stop strings are more than the limit of {MAX_STOPS}", stops.len());
        return Err(ApiError::invalid("stop", reason));
    }
    if let Some(long) = stops.iter().map(String::len).find(|&len| len > MAX_STOP_LEN) {
        let reason = format!("a stop string of {long} bytes is longer than the limit of {MAX_STOP_LEN}");
        return Err(ApiError::invalid("stop", reason));
    }
    if stops.iter().any(String::is_empty) {
        return Err(ApiError::invalid("stop", "an empty stop string would end every answer"));
    }
    Ok(stops)
}

fn delivery(fields: &mut Fields) -> Result<Delivery, ApiError> {
    let streamed = fields.take("stream")?.unwrap_or(false);
    let options = fields.take_value("stream_options");
    if !streamed {
        return match options {
            Some(_) => Err(ApiError::invalid("stream_options", "only allowed with `stream: true`")),
            None => Ok(Delivery::Whole),
        };
    }
    let Some(options) = options else { return Ok(Delivery::Stream(UsageChunk::Omitted)) };
    let mut options = Fields::of(options, "stream_options")?;
    let usage =
        if options.take("include_usage")?.unwrap_or(false) { UsageChunk::Sent } else { UsageChunk::Omitted };
    options.take_inert(&[inert("include_obfuscation", is_false, "nothing is obfuscated")])?;
    options.finish()?;
    Ok(Delivery::Stream(usage))
}

/// Takes `grammar`, `json_schema` and `response_format`, of which at most one may be given.
pub(crate) fn take_constraint(fields: &mut Fields) -> Result<Constraint, ApiError> {
    let grammar =
        fields.take::<String>("grammar")?.filter(|gbnf| !gbnf.trim().is_empty()).map(Constraint::Grammar);
    let schema =
        fields.take_value("json_schema").map(|schema| checked_schema(schema, "json_schema")).transpose()?;
    let schema = schema.map(|schema| Constraint::Schema { schema, origin: SchemaOrigin::JsonSchema });
    let format = fields.take_value("response_format").map(response_format).transpose()?;
    let mut given =
        [grammar, schema, format.filter(|format| *format != Constraint::Free)].into_iter().flatten();
    match (given.next(), given.next()) {
        (Some(_), Some(_)) => Err(ApiError::invalid(
            "response_format",
            "only one of response_format, json_schema, grammar may be given",
        )),
        (only, _) => Ok(only.unwrap_or_default()),
    }
}

fn response_format(format: Value) -> Result<Constraint, ApiError> {
    let mut format = Fields::of(format, "response_format")?;
    let kind: String = format.require("type")?;
    let schema = match kind.as_str() {
        "text" => None,
        // llama-server takes a schema here too. Without one any object is meant.
        "json_object" => {
            let schema = format.take_value("schema").unwrap_or_else(|| serde_json::json!({}));
            Some(checked_schema(schema, "response_format.schema")?)
        }
        "json_schema" => {
            let mut wrapper = Fields::of(format.require("json_schema")?, "response_format.json_schema")?;
            // The name and description are for a model's eyes, which get only the messages; every schema is strict.
            wrapper.pass_over(&["name", "description", "strict"]);
            let schema = checked_schema(wrapper.require("schema")?, "response_format.json_schema.schema")?;
            wrapper.finish()?;
            Some(schema)
        }
        other => {
            let reason = format!("\"{}\" is none of text, json_object, json_schema", quoted(other));
            return Err(ApiError::invalid("response_format.type", reason));
        }
    };
    format.finish()?;
    let constraint = |schema| Constraint::Schema { schema, origin: SchemaOrigin::ResponseFormat };
    Ok(schema.map_or(Constraint::Free, constraint))
}

/// An empty schema means any object, as in llama-server.
fn checked_schema(schema: Value, path: &str) -> Result<Value, ApiError> {
    match schema {
        Value::Object(map) if map.is_empty() => Ok(serde_json::json!({ "type": "object" })),
        schema @ Value::Object(_) => Ok(schema),
        _ => Err(ApiError::invalid(path, "a JSON schema is expected")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const N_CTX: u32 = 512;

    fn common(value: Value) -> Result<Common, ApiError> {
        let mut fields = Fields::of(value, "").unwrap();
        let common = Common::take(&mut fields, N_CTX)?;
        fields.take_inert(INERT)?;
        fields.finish()?;
        Ok(common)
    }

    fn constraint(value: Value) -> Result<Constraint, ApiError> {
        let mut fields = Fields::of(value, "").unwrap();
        let constraint = take_constraint(&mut fields)?;
        fields.take_inert(INERT)?;
        fields.finish()?;
        Ok(constraint)
    }

    #[test]
    fn case_21_values_out_of_range_are_refused_by_name() {
        for (value, param) in [
            (json!({ "max_tokens": 0 }), "max_tokens"),
            (json!({ "max_tokens": -1 }), "max_tokens"),
            (json!({ "max_tokens": 513 }), "max_tokens"),
            (json!({ "max_tokens": 4_294_967_297_u64 }), "max_tokens"),
            (json!({ "max_tokens": 1.5 }), "max_tokens"),
            (json!({ "max_tokens": "7" }), "max_tokens"),
            (json!({ "max_completion_tokens": 0 }), "max_completion_tokens"),
            (json!({ "max_completion_tokens": 5, "max_tokens": 6 }), "max_tokens"),
            (json!({ "temperature": -0.1 }), "temperature"),
            (json!({ "temperature": 2.1 }), "temperature"),
            (json!({ "temperature": 1e300 }), "temperature"),
            (json!({ "temperature": "hot" }), "temperature"),
            (json!({ "top_p": 1.1 }), "top_p"),
            (json!({ "top_k": -2 }), "top_k"),
            (json!({ "min_p": -1 }), "min_p"),
            (json!({ "seed": 1.5 }), "seed"),
            (json!({ "repeat_penalty": 0 }), "repeat_penalty"),
            (json!({ "presence_penalty": 3 }), "presence_penalty"),
            (json!({ "frequency_penalty": -3 }), "frequency_penalty"),
            (json!({ "logit_bias": 3 }), "logit_bias"),
            (json!({ "logit_bias": { "x": 3 } }), "logit_bias[\"x\"]"),
            (json!({ "logit_bias": { "1": 101 } }), "logit_bias[\"1\"]"),
            (json!({ "logit_bias": [[1, "x"]] }), "logit_bias[1]"),
            (json!({ "stop": 1 }), "stop"),
            (json!({ "stop": "" }), "stop"),
            (json!({ "stop": ["a", 1] }), "stop"),
            (json!({ "stop": ["a", ""] }), "stop"),
            (json!({ "stop": vec!["a"; 17] }), "stop"),
            (json!({ "stop": "a".repeat(513) }), "stop"),
            (json!({ "stream": "yes" }), "stream"),
            (json!({ "stream_options": {} }), "stream_options"),
            (json!({ "stream": true, "stream_options": { "usage": true } }), "stream_options.usage"),
            (json!({ "ignore_eos": 1 }), "ignore_eos"),
            (json!({ "model": 1 }), "model"),
        ] {
            let error = common(value.clone()).unwrap_err();
            assert_eq!(error.param(), Some(param), "{value}: {error}");
            assert_eq!(error.status_and_code().0, 400);
        }
    }

    #[test]
    fn what_has_no_effect_is_refused_unless_it_asks_for_nothing() {
        for (value, param) in [
            (json!({ "n": 2 }), "n"),
            (json!({ "functions": [] }), "functions"),
            (json!({ "store": true }), "store"),
            (json!({ "modalities": ["text", "audio"] }), "modalities"),
            (json!({ "mirostat": 2 }), "mirostat"),
            (json!({ "temprature": 1 }), "temprature"),
        ] {
            let error = common(value.clone()).unwrap_err();
            assert_eq!(error.param(), Some(param), "{value}: {error}");
            assert!(error.status_and_code().1.ends_with("_parameter"));
        }
        let neutral = json!({ "n": 1, "store": false, "modalities": ["text"], "functions": null, "typical_p": 1.0,
            "user": "me", "metadata": { "a": "b" }, "cache_prompt": true });
        common(neutral).unwrap();
    }

    #[test]
    fn both_numbers_are_told_when_too_many_tokens_are_asked_for() {
        let message = common(json!({ "max_tokens": 100_000 })).unwrap_err().to_string();
        assert!(message.contains("100000") && message.contains("512"), "{message}");
        assert_eq!(common(json!({ "max_completion_tokens": 512 })).unwrap().max_tokens, Some(512));
    }

    #[test]
    fn an_empty_request_gets_llama_servers_defaults() {
        let common = common(json!({})).unwrap();
        let Sampling { temperature, top_k, top_p, min_p, repeat_last_n, .. } = common.sampling;
        assert_eq!((temperature, top_k, top_p, min_p, repeat_last_n), (0.8, Some(40), 0.95, 0.05, Some(64)));
        assert_eq!(common.max_tokens, None);
        assert_eq!(common.delivery, Delivery::Whole);
    }

    #[test]
    fn off_values_reach_the_sampler_as_off() {
        let sampling = common(json!({ "top_k": 0, "top_p": 0, "repeat_last_n": -1, "temperature": 0 }))
            .unwrap()
            .sampling;
        assert_eq!((sampling.top_k, sampling.repeat_last_n, sampling.temperature), (None, None, 0.0));
        assert!(sampling.top_p > 0.0);
        assert_eq!(common(json!({ "top_k": -1 })).unwrap().sampling.top_k, None);
    }

    #[test]
    fn seeds_of_any_sign_are_kept_and_minus_one_is_random() {
        let seed = |value: Value| common(json!({ "seed": value })).unwrap().sampling.seed;
        assert_eq!(seed(json!(7)), 7);
        assert_eq!(seed(json!(u64::MAX)), u64::MAX);
        assert_eq!(seed(json!(-2)), (-2_i64).cast_unsigned());
        assert_ne!(seed(json!(-1)), seed(json!(-1)));
    }

    #[test]
    fn logit_biases_come_as_an_object_or_as_pairs() {
        let biases = |value: Value| common(json!({ "logit_bias": value })).unwrap().sampling.logit_bias;
        assert_eq!(biases(json!({ "5": -100 })), [LogitBias { token: 5, bias: -100.0 }]);
        assert_eq!(biases(json!([[5, false]])), [LogitBias { token: 5, bias: f32::NEG_INFINITY }]);
    }

    #[test]
    fn a_stop_may_be_one_string_or_several() {
        assert_eq!(common(json!({ "stop": "a" })).unwrap().stops, ["a"]);
        assert_eq!(common(json!({ "stop": ["a", "b"] })).unwrap().stops, ["a", "b"]);
        assert!(common(json!({ "stop": [] })).unwrap().stops.is_empty());
    }

    #[test]
    fn a_stream_may_ask_for_usage() {
        let with = json!({ "stream": true, "stream_options": { "include_usage": true } });
        assert_eq!(common(with).unwrap().delivery, Delivery::Stream(UsageChunk::Sent));
        assert_eq!(
            common(json!({ "stream": true })).unwrap().delivery,
            Delivery::Stream(UsageChunk::Omitted)
        );
    }

    #[test]
    fn response_formats_become_constraints() {
        let schema = json!({ "type": "object", "properties": {} });
        let format = |value: Value| constraint(json!({ "response_format": value })).unwrap();
        assert_eq!(format(json!({ "type": "text" })), Constraint::Free);
        let described = |schema| Constraint::Schema { schema, origin: SchemaOrigin::ResponseFormat };
        assert_eq!(format(json!({ "type": "json_object" })), described(json!({ "type": "object" })));
        let named = json!({ "type": "json_schema", "json_schema": { "name": "a", "schema": schema, "strict": true } });
        assert_eq!(format(named), described(schema.clone()));
        let own = Constraint::Schema { schema: schema.clone(), origin: SchemaOrigin::JsonSchema };
        assert_eq!(constraint(json!({ "json_schema": schema })).unwrap(), own);
        assert_eq!(
            constraint(json!({ "grammar": "root ::= \"a\"" })).unwrap(),
            Constraint::Grammar("root ::= \"a\"".into())
        );
    }

    #[test]
    fn constraints_that_make_no_sense_are_refused_by_name() {
        for (value, param) in [
            (json!({ "response_format": "json" }), "response_format"),
            (json!({ "response_format": { "type": "xml" } }), "response_format.type"),
            (json!({ "response_format": { "type": "json_schema" } }), "response_format.json_schema"),
            (
                json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "a" } } }),
                "response_format.json_schema.schema",
            ),
            (json!({ "json_schema": [] }), "json_schema"),
            (json!({ "json_schema": { "type": "object" }, "grammar": "root ::= \"a\"" }), "response_format"),
        ] {
            let error = constraint(value.clone()).unwrap_err();
            assert_eq!(error.param(), Some(param), "{value}: {error}");
        }
    }
}
