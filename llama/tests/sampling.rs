//! Choosing tokens, on random logits over SmolLM2's vocabulary.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests may, as tests may"
)]

mod smollm;

use llama::chat::{ChatRequest, ChatTemplates, Completeness};
use llama::grammar::{Grammar, GrammarError, ThinkingTags, json_schema_to_gbnf};
use llama::sampler::{LogitBias, Sampler, SamplerError, SamplerParams, logprobs};
use llama::{AddSpecial, Special, Token, Vocab};
use serde_json::{Value, json};

fn vocab() -> Vocab {
    smollm::model().vocab()
}

fn sampler(params: &SamplerParams) -> Sampler {
    Sampler::new(&vocab(), params).unwrap()
}

/// Pseudo-random logits in [-8, 8), different for each `seed`.
fn random_logits(seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..vocab().n_tokens())
        .map(|_| {
            // xorshift64
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u32 << 20) as f32 - 8.0
        })
        .collect()
}

fn argmax(logits: &[f32]) -> Token {
    let best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
    Token(best as i32)
}

/// Token ids by falling logit.
fn ranking(logits: &[f32]) -> Vec<i32> {
    let mut ids: Vec<i32> = (0..logits.len() as i32).collect();
    ids.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
    ids
}

/// All filters off.
fn plain(temperature: f32) -> SamplerParams {
    SamplerParams { temperature, top_k: None, top_p: 1.0, min_p: 0.0, ..SamplerParams::default() }
}

fn tokens(text: &str) -> Vec<Token> {
    vocab().tokenize(text, AddSpecial::No, Special::Control).unwrap()
}

fn token(text: &str) -> Token {
    let found = tokens(text);
    assert_eq!(found.len(), 1, "{text:?} is {found:?}");
    found[0]
}

fn text(tokens: &[Token]) -> String {
    let mut bytes = Vec::new();
    for token in tokens {
        vocab().append_bytes(*token, Special::Control, &mut bytes).unwrap();
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Generates from random logits until the end or `limit` tokens; the end is not in the result.
fn generate(sampler: &mut Sampler, seed: u64, limit: u32) -> Vec<Token> {
    let mut generated = Vec::new();
    for position in 0..limit {
        let logits = random_logits(seed * 1000 + u64::from(position));
        let token = sampler.sample(&logits, position).unwrap();
        sampler.accept(token).unwrap();
        if vocab().is_end_of_generation(token) {
            break;
        }
        generated.push(token);
    }
    generated
}

#[test]
fn greedy_is_the_argmax() {
    for temperature in [0.0, -1.0, 1e-9] {
        let mut greedy = sampler(&plain(temperature));
        for seed in 0..20 {
            let logits = random_logits(seed);
            assert_eq!(greedy.sample(&logits, seed as u32), Ok(argmax(&logits)));
        }
    }
}

#[test]
fn among_equal_logits_greedy_takes_the_first_token() {
    let mut logits = vec![0.0; vocab().n_tokens() as usize];
    logits[900] = 3.0;
    logits[700] = 3.0;
    assert_eq!(sampler(&SamplerParams::greedy()).sample(&logits, 0), Ok(Token(700)));
}

#[test]
fn a_draw_depends_on_seed_and_position_alone() {
    let params = SamplerParams { temperature: 1.0, seed: 7, ..SamplerParams::default() };
    let logits = random_logits(1);
    let mut first = sampler(&params);
    let forwards: Vec<_> = (0..200).map(|position| first.sample(&logits, position).unwrap()).collect();
    let mut second = sampler(&params);
    second.sample(&random_logits(5), 3).unwrap();
    let mut backwards: Vec<_> =
        (0..200).rev().map(|position| second.sample(&logits, position).unwrap()).collect();
    backwards.reverse();
    assert_eq!(forwards, backwards);
    let mut other = sampler(&SamplerParams { seed: 8, ..params });
    let others: Vec<_> = (0..200).map(|position| other.sample(&logits, position).unwrap()).collect();
    assert_ne!(forwards, others);
    assert!(forwards.iter().any(|token| *token != forwards[0]));
}

#[test]
fn tokens_are_drawn_as_often_as_they_are_likely() {
    // Eight likely tokens share almost all of the probability.
    let mut logits = vec![-30.0f32; vocab().n_tokens() as usize];
    let likely: Vec<usize> = (0..8).map(|i| 100 + 37 * i).collect();
    for (rank, id) in likely.iter().enumerate() {
        logits[*id] = rank as f32 * 0.4;
    }
    let temperature = 0.7f64;
    let weights: Vec<f64> = (0..8).map(|rank| (f64::from(rank) * 0.4 / temperature).exp()).collect();
    let total: f64 = weights.iter().sum();
    // Each way through llama.cpp's filters: unsorted, sorted by top-k, by top-p.
    for params in [
        plain(0.7),
        SamplerParams { top_k: Some(8), ..plain(0.7) },
        SamplerParams { top_k: Some(1000), top_p: 0.999_99, ..plain(0.7) },
        SamplerParams { min_p: 0.001, ..plain(0.7) },
    ] {
        let n = 4_000u32;
        let mut counts = [0u32; 8];
        let mut sampler = sampler(&SamplerParams { seed: 3, ..params.clone() });
        for position in 0..n {
            let token = sampler.sample(&logits, position).unwrap();
            counts[likely.iter().position(|id| *id == token.0 as usize).unwrap()] += 1;
        }
        let chi2: f64 = counts
            .iter()
            .zip(&weights)
            .map(|(count, weight)| {
                let expected = f64::from(n) * weight / total;
                (f64::from(*count) - expected).powi(2) / expected
            })
            .sum();
        assert!(chi2 < 24.3, "7 degrees of freedom, p = 0.001: {chi2} for {params:?}");
    }
}

#[test]
fn filters_keep_only_likely_tokens() {
    let logits = random_logits(2);
    let ranking = ranking(&logits);
    let peak = logits[ranking[0] as usize];
    let drawn = |params: SamplerParams| -> Vec<i32> {
        let mut sampler = sampler(&params);
        (0..100).map(|position| sampler.sample(&logits, position).unwrap().0).collect()
    };
    let top_k = drawn(SamplerParams { top_k: Some(5), ..plain(2.0) });
    assert!(top_k.iter().all(|id| ranking[..5].contains(id)));
    assert!(ranking[..5].iter().all(|id| top_k.contains(id)));
    assert!(drawn(SamplerParams { top_k: Some(1), ..plain(2.0) }).iter().all(|id| *id == ranking[0]));
    let min_p = drawn(SamplerParams { min_p: 0.9, ..plain(2.0) });
    assert!(min_p.iter().all(|id| logits[*id as usize] >= peak + 0.9f32.ln() - 1e-5));
    assert!(drawn(SamplerParams { top_p: 0.0, ..plain(2.0) }).iter().all(|id| *id == ranking[0]));
    // More than the vocabulary has.
    drawn(SamplerParams { top_k: Some(u32::MAX), top_p: 0.5, ..plain(2.0) });
}

#[test]
fn a_bias_forces_or_forbids_a_token() {
    let logits = random_logits(3);
    let best = argmax(&logits);
    let bias = |token, bias| SamplerParams {
        logit_bias: vec![LogitBias { token, bias }],
        ..SamplerParams::greedy()
    };
    assert_ne!(sampler(&bias(best, f32::NEG_INFINITY)).sample(&logits, 0), Ok(best));
    assert_eq!(sampler(&bias(Token(5), 100.0)).sample(&logits, 0), Ok(Token(5)));
    let all =
        (0..vocab().n_tokens() as i32).map(|id| LogitBias { token: Token(id), bias: f32::NEG_INFINITY });
    for temperature in [0.0, 0.8] {
        let params =
            SamplerParams { temperature, logit_bias: all.clone().collect(), ..SamplerParams::default() };
        assert_eq!(sampler(&params).sample(&logits, 4), Err(SamplerError::NothingAllowed { position: 4 }));
    }
}

#[test]
fn penalties_see_prompt_and_answer_and_forget() {
    let mut logits = vec![0.0f32; vocab().n_tokens() as usize];
    (logits[10], logits[20], logits[30]) = (3.0, 2.5, 2.2);
    let params = SamplerParams { repeat_penalty: 1.3, repeat_last_n: Some(2), ..SamplerParams::greedy() };
    let mut penalised = sampler(&params);
    assert_eq!(penalised.sample(&logits, 0), Ok(Token(10)));
    penalised.accept_prompt(&[Token(10)]).unwrap();
    assert_eq!(penalised.sample(&logits, 0), Ok(Token(20)));
    penalised.accept(Token(20)).unwrap();
    assert_eq!(penalised.sample(&logits, 1), Ok(Token(10)), "3 / 1.3 is more than 2.2");
    penalised.replay(&[Token(1), Token(2)]).unwrap();
    assert_eq!(penalised.sample(&logits, 3), Ok(Token(10)));

    let presence = SamplerParams { presence_penalty: 0.6, repeat_last_n: None, ..SamplerParams::greedy() };
    let mut penalised = sampler(&presence);
    penalised.replay(&[Token(10), Token(10), Token(10)]).unwrap();
    assert_eq!(penalised.sample(&logits, 0), Ok(Token(20)));
    penalised.replay(&[Token(20)]).unwrap();
    assert_eq!(penalised.sample(&logits, 0), Ok(Token(10)), "present is present, however often");

    let frequency = SamplerParams { frequency_penalty: 0.3, repeat_last_n: None, ..SamplerParams::greedy() };
    let mut penalised = sampler(&frequency);
    penalised.accept(Token(10)).unwrap();
    assert_eq!(penalised.sample(&logits, 0), Ok(Token(10)));
    penalised.accept(Token(10)).unwrap();
    assert_eq!(penalised.sample(&logits, 0), Ok(Token(20)));
}

#[test]
fn wrong_parameters_are_refused_by_name() {
    let vocab = vocab();
    let with = |change: fn(&mut SamplerParams)| {
        let mut params = SamplerParams::default();
        change(&mut params);
        Sampler::new(&vocab, &params).unwrap_err()
    };
    let named = [
        with(|p| p.temperature = f32::NAN),
        with(|p| p.top_p = -0.1),
        with(|p| p.min_p = f32::INFINITY),
        with(|p| p.repeat_penalty = 0.0),
        with(|p| p.presence_penalty = f32::NAN),
        with(|p| p.frequency_penalty = f32::NEG_INFINITY),
        with(|p| p.logit_bias = vec![LogitBias { token: Token(0), bias: f32::INFINITY }]),
    ];
    let fields: Vec<_> = named
        .into_iter()
        .map(|error| match error {
            SamplerError::Param { field, .. } => field,
            other => panic!("{other}"),
        })
        .collect();
    let expected = [
        "temperature",
        "top_p",
        "min_p",
        "repeat_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
    ];
    assert_eq!(fields, expected);
    for token in [Token(-1), Token(vocab.n_tokens() as i32)] {
        let params =
            SamplerParams { logit_bias: vec![LogitBias { token, bias: 1.0 }], ..SamplerParams::default() };
        assert!(matches!(Sampler::new(&vocab, &params), Err(SamplerError::Token { .. })));
        assert!(matches!(sampler(&SamplerParams::default()).accept(token), Err(SamplerError::Token { .. })));
    }
}

#[test]
fn logits_that_are_none_are_errors() {
    for temperature in [0.0, 1.0] {
        let mut sampler = sampler(&SamplerParams { temperature, ..SamplerParams::default() });
        assert!(matches!(sampler.sample(&[1.0; 5], 0), Err(SamplerError::LogitCount { got: 5, .. })));
        let mut logits = random_logits(4);
        logits[77] = f32::NAN;
        assert!(matches!(sampler.sample(&logits, 0), Err(SamplerError::BadLogit { token: Token(77), .. })));
    }
}

#[test]
fn logprobs_sum_to_one_and_are_sorted() {
    let logits = random_logits(6);
    let (own, top) = logprobs(&logits, argmax(&logits), 20).unwrap();
    assert_eq!(top[0], (argmax(&logits), own));
    assert!(top.windows(2).all(|pair| pair[0].1 >= pair[1].1));
    let ids: Vec<i32> = top.iter().map(|(token, _)| token.0).collect();
    assert_eq!(ids, ranking(&logits)[..20]);
    let (_, all) = logprobs(&logits, Token(0), logits.len()).unwrap();
    let sum: f64 = all.iter().map(|(_, logprob)| f64::from(*logprob).exp()).sum();
    assert!((sum - 1.0).abs() < 1e-4, "{sum}");
}

/// A schema whose answers end soon even if every choice is random.
fn person_schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "mood": {"enum": ["happy", "sad", "süß"]},
            "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        },
        "required": ["name", "age", "mood", "tags"],
        "additionalProperties": false,
    })
}

fn assert_is_person(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let name = value["name"].as_str().unwrap().chars().count();
    assert!((1..=8).contains(&name), "{text}");
    assert!(value["age"].as_u64().unwrap() <= 150, "{text}");
    assert!(["happy", "sad", "süß"].contains(&value["mood"].as_str().unwrap()), "{text}");
    assert!(value["tags"].as_array().unwrap().iter().all(Value::is_boolean), "{text}");
    assert_eq!(value.as_object().unwrap().len(), 4, "{text}");
}

#[test]
fn a_schema_is_obeyed_whatever_the_logits() {
    let gbnf = json_schema_to_gbnf(&person_schema().to_string()).unwrap();
    for (seed, temperature) in [(1, 0.0), (2, 0.0), (3, 1.0), (4, 1.0), (5, 5.0), (6, 0.8)] {
        let grammar = Some(Grammar::new(gbnf.as_str()));
        let mut sampler = sampler(&SamplerParams { temperature, grammar, seed, ..SamplerParams::default() });
        let generated = generate(&mut sampler, seed, 300);
        assert_is_person(&text(&generated));
    }
}

#[test]
fn a_replayed_answer_goes_on_as_it_would_have() {
    let gbnf = json_schema_to_gbnf(&person_schema().to_string()).unwrap();
    let params = SamplerParams {
        temperature: 1.0,
        seed: 11,
        repeat_penalty: 1.1,
        grammar: Some(Grammar::new(gbnf)),
        ..SamplerParams::default()
    };
    let mut whole = sampler(&params);
    whole.accept_prompt(&tokens("Who?")).unwrap();
    let generated = generate(&mut whole, 11, 300);
    for cut in [1, generated.len() / 2, generated.len() - 1] {
        let mut again = sampler(&params);
        again.accept_prompt(&tokens("Who?")).unwrap();
        again.replay(&generated[..cut]).unwrap();
        for (position, expected) in generated.iter().enumerate().skip(cut) {
            let logits = random_logits(11 * 1000 + position as u64);
            let token = again.sample(&logits, position as u32).unwrap();
            assert_eq!(token, *expected);
            again.accept(token).unwrap();
        }
    }
}

#[test]
fn a_token_the_grammar_does_not_allow_is_an_error_and_changes_nothing() {
    let grammar = Some(Grammar::new("root ::= \"yes\" | \"no\""));
    let mut sampler = sampler(&SamplerParams { grammar, ..SamplerParams::greedy() });
    // llama.cpp aborts the process when it accepts an end it does not expect.
    let end = vocab().eos().unwrap();
    assert!(matches!(sampler.accept(end), Err(SamplerError::NotAllowed { .. })));
    assert!(matches!(sampler.accept(token("maybe")), Err(SamplerError::NotAllowed { .. })));
    sampler.accept(token("yes")).unwrap();
    assert!(matches!(sampler.accept(token("yes")), Err(SamplerError::NotAllowed { .. })));
    let only_end = sampler.sample(&random_logits(8), 1).unwrap();
    assert!(vocab().is_end_of_generation(only_end));
    sampler.accept(only_end).unwrap();
}

#[test]
fn a_dead_end_is_an_error() {
    // No token of the vocabulary is this character.
    let grammar = Some(Grammar::new("root ::= \"\\x01\\x02\\x03\""));
    let bias = (0..vocab().n_tokens() as i32)
        .map(Token)
        .filter(|token| vocab().token_bytes(*token, Special::Control).unwrap().first() == Some(&1))
        .map(|token| LogitBias { token, bias: f32::NEG_INFINITY })
        .collect();
    let mut sampler = sampler(&SamplerParams { grammar, logit_bias: bias, ..SamplerParams::default() });
    assert_eq!(sampler.sample(&random_logits(9), 2), Err(SamplerError::NothingAllowed { position: 2 }));
}

#[test]
fn grammars_that_would_crash_or_stall_llama_cpp_are_refused() {
    let vocab = vocab();
    let refused = |gbnf: String| match Grammar::new(gbnf).check(&vocab) {
        Err(GrammarError::Refused { reason }) => reason,
        other => panic!("{other:?}"),
    };
    let nested = "(".repeat(50_000) + "\"a\"" + &")".repeat(50_000);
    assert!(refused(format!("root ::= {nested}")).contains("nest"));
    assert!(refused("root ::= root \"a\" | \"a\"".into()).contains("left-recursive"));
    // llama.cpp overlooks this one, and then piles up "x" for ever.
    assert!(refused("root ::= a root \"x\" | \"y\"\na ::= b\nb ::= \"\"".into()).contains("left-recursive"));
    let mut doubling: String = (0..40).map(|i| format!("a{i} ::= a{} | a{}\n", i + 1, i + 1)).collect();
    doubling += "a40 ::= \"x\"\nroot ::= a0";
    assert!(refused(doubling).contains("too many ways"));
    let mut chain: String = (0..20_000).map(|i| format!("a{i} ::= a{}\n", i + 1)).collect();
    chain += "a20000 ::= \"x\"\nroot ::= a0";
    assert!(refused(chain).contains("too many ways"));
    let many = (0..3000).map(|i| format!("\"{i}\"")).collect::<Vec<_>>().join(" | ");
    assert!(refused(format!("root ::= {many}")).contains("more than 1000 ways"));
    for gbnf in [
        "",
        "rot ::= \"a\"",
        "root ::= b",
        "root := \"a\"",
        "root ::= \"a",
        "root ::= \"a\"{99999999999999999999}",
    ] {
        refused(gbnf.into());
    }
    assert!(matches!(Grammar::new("x".repeat(2 << 20)).check(&vocab), Err(GrammarError::Bytes { .. })));
    let lazy = Grammar { lazy: true, ..Grammar::new("root ::= \"a\"") };
    assert_eq!(lazy.check(&vocab), Err(GrammarError::NoTrigger));
    let pattern = Grammar { trigger_patterns: vec!["(".into()], ..lazy };
    assert!(matches!(pattern.check(&vocab), Err(GrammarError::Refused { .. })));
}

#[test]
fn an_ambiguous_grammar_ends_its_own_request() {
    // Each "a" doubles the ways to read what came before.
    let gbnf = "root ::= s\ns ::= \"a\" s \"b\" | \"a\" s \"c\" | \"a\"";
    let mut sampler =
        sampler(&SamplerParams { grammar: Some(Grammar::new(gbnf)), ..SamplerParams::greedy() });
    let error = (0..100).find_map(|_| sampler.accept(token("a")).err()).unwrap();
    assert!(error.to_string().contains("more than 1000 ways"), "{error}");
    assert!(sampler.sample(&random_logits(1), 5).is_err());
    assert!(sampler.accept(token("a")).is_err());
}

#[test]
fn a_grammar_with_endless_ways_to_read_a_long_token_is_an_error() {
    // There are 4^n ways to read n characters, and all are tried for a token such as "constitutive", whose first e comes
    // late: llama.cpp never came back.
    let ways = ["0", "1", "2", "3"].map(|end| format!("[^e] s \"{end}\"")).join(" | ");
    let gbnf = format!("root ::= s\ns ::= {ways} | [^e]");
    let mut sampler =
        sampler(&SamplerParams { grammar: Some(Grammar::new(gbnf)), ..SamplerParams::greedy() });
    let mut logits = random_logits(1);
    // Not allowed: so the whole vocabulary is looked at.
    logits[token("e").0 as usize] = 100.0;
    let error = sampler.sample(&logits, 0).unwrap_err();
    assert!(error.to_string().contains("ambiguous"), "{error}");
    let longest = (0..vocab().n_tokens() as i32)
        .map(Token)
        .filter(|token| vocab().token_bytes(*token, Special::Text).unwrap().iter().all(|byte| *byte == b' '))
        .max_by_key(|token| vocab().token_bytes(*token, Special::Text).unwrap().len())
        .unwrap();
    assert!(sampler.accept(longest).is_err());
    // Its request is over.
    assert!(sampler.accept(token(" ")).is_err());
}

/// Binds from "<call>" on; the call is one of two words.
fn lazy_grammar() -> Grammar {
    Grammar {
        lazy: true,
        trigger_patterns: vec!["<call>".into()],
        ..Grammar::new("root ::= \"<call>\" (\"up\" | \"down\")")
    }
}

#[test]
fn a_lazy_grammar_binds_after_its_trigger() {
    let params = SamplerParams { grammar: Some(lazy_grammar()), ..SamplerParams::greedy() };
    let mut sampler = sampler(&params);
    let free = generate(&mut sampler, 21, 20);
    assert_eq!(free.len(), 20, "nothing is forbidden before the trigger");
    sampler.replay(&tokens("So: <call>")).unwrap();
    let bound = text(&generate(&mut sampler, 22, 20));
    assert!(["up", "down"].contains(&bound.as_str()), "{bound}");
}

#[test]
fn a_trigger_token_binds_with_itself() {
    let marker = token("<jupyter_code>");
    let grammar = Grammar {
        lazy: true,
        trigger_tokens: vec![marker],
        ..Grammar::new("root ::= <jupyter_code> \"up\"")
    };
    let mut sampler = sampler(&SamplerParams { grammar: Some(grammar), ..SamplerParams::greedy() });
    sampler.replay(&tokens("Text before it.")).unwrap();
    sampler.accept(marker).unwrap();
    assert_eq!(text(&generate(&mut sampler, 23, 9)), "up");
}

#[test]
fn a_trigger_that_is_only_talked_about_does_not_bind() {
    // The token that completes the trigger goes on with what the grammar forbids.
    let mut grammar = lazy_grammar();
    grammar.trigger_patterns = vec!["ye".into()];
    grammar.gbnf = "root ::= \"ye!\"".into();
    let mut sampler = sampler(&SamplerParams { grammar: Some(grammar), ..SamplerParams::greedy() });
    sampler.accept(token("yes")).unwrap();
    assert_eq!(generate(&mut sampler, 24, 10).len(), 10);
}

#[test]
fn a_pattern_binds_from_its_first_group() {
    let mut grammar = lazy_grammar();
    grammar.trigger_patterns = vec!["turn\\s+(<call>)".into()];
    let mut sampler = sampler(&SamplerParams { grammar: Some(grammar), ..SamplerParams::greedy() });
    sampler.replay(&tokens("<call> and turn  <call>")).unwrap();
    let bound = text(&generate(&mut sampler, 25, 20));
    assert!(["up", "down"].contains(&bound.as_str()), "{bound}");
}

#[test]
fn a_trigger_inside_of_thinking_does_not_bind() {
    let thinking = ThinkingTags { start: "<think>".into(), ends: vec!["</think>".into()] };
    let grammar = Grammar { thinking: Some(thinking), prefill: "<think>\n".into(), ..lazy_grammar() };
    let mut sampler = sampler(&SamplerParams { grammar: Some(grammar), ..SamplerParams::greedy() });
    // The prompt ended with "<think>".
    sampler.replay(&tokens("I could <call> now.")).unwrap();
    assert_eq!(generate(&mut sampler, 26, 10).len(), 10);
    // As the tokens of the tag alone, as models write it.
    sampler.replay(&tokens("</think>")).unwrap();
    sampler.replay(&tokens("\n<call>")).unwrap();
    let bound = text(&generate(&mut sampler, 27, 20));
    assert!(["up", "down"].contains(&bound.as_str()), "{bound}");
}

#[test]
fn a_schema_that_is_no_schema_is_refused_with_the_reason() {
    assert!(matches!(json_schema_to_gbnf("{"), Err(GrammarError::NotJson { .. })));
    assert!(matches!(json_schema_to_gbnf(&("[".repeat(100_000))), Err(GrammarError::NotJson { .. })));
    let Err(GrammarError::Refused { reason }) = json_schema_to_gbnf(r#"{"type": "strin"}"#) else { panic!() };
    assert!(reason.contains("strin"), "{reason}");
    let Err(GrammarError::Refused { reason }) = json_schema_to_gbnf(r##"{"$ref": "#/$defs/none"}"##) else {
        panic!()
    };
    assert!(reason.contains("none"), "{reason}");
}

#[test]
fn a_required_tool_call_is_generated_and_parsed_from_random_logits() {
    let source = include_str!("templates/tools.jinja");
    let templates = ChatTemplates::new(smollm::model(), Some(source)).unwrap();
    let tool = json!({"type": "function", "function": {"name": "register", "parameters": person_schema()}});
    let request: ChatRequest = serde_json::from_value(json!({
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": false,
    }))
    .unwrap();
    let prompt = templates.apply(&request).unwrap();
    let params =
        SamplerParams { grammar: prompt.grammar.clone(), temperature: 1.0, ..SamplerParams::default() };
    let mut sampler = sampler(&params);
    // Text before the call may be anything: begin the call.
    let begin = "Well.\n<tool_call>\n";
    sampler.replay(&tokens(begin)).unwrap();
    let generated = begin.to_owned() + &text(&generate(&mut sampler, 31, 300));
    let message = prompt.parser.parse(&generated, Completeness::Complete).unwrap();
    assert!(!message.tool_calls.is_empty(), "{generated}");
    assert_eq!(message.tool_calls[0].name, "register");
    assert_is_person(&message.tool_calls[0].arguments);
}

#[test]
fn a_response_format_is_obeyed_from_random_logits() {
    let templates = ChatTemplates::new(smollm::model(), None).unwrap();
    let request: ChatRequest = serde_json::from_value(json!({
        "messages": [{"role": "user", "content": "Hi"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": person_schema()}},
    }))
    .unwrap();
    let prompt = templates.apply(&request).unwrap();
    for seed in [41, 42] {
        let params = SamplerParams {
            grammar: prompt.grammar.clone(),
            temperature: 1.0,
            seed,
            ..SamplerParams::default()
        };
        let generated = text(&generate(&mut sampler(&params), seed, 600));
        let message = prompt.parser.parse(&generated, Completeness::Complete).unwrap();
        assert_is_person(&message.content);
    }
}

#[test]
fn a_sampler_can_move_to_another_thread() {
    let gbnf = json_schema_to_gbnf(&person_schema().to_string()).unwrap();
    let mut moved = sampler(&SamplerParams { grammar: Some(Grammar::new(gbnf)), ..SamplerParams::greedy() });
    let generated = std::thread::spawn(move || generate(&mut moved, 51, 300)).join().unwrap();
    assert_is_person(&text(&generated));
}

#[test]
fn a_pattern_is_found_at_the_end_of_a_long_answer() {
    let mut grammar = lazy_grammar();
    grammar.trigger_patterns = vec!["^never$".into(), "turn\\s+(<call>)".into()];
    let mut sampler = sampler(&SamplerParams { grammar: Some(grammar), ..SamplerParams::greedy() });
    sampler.replay(&tokens(&"A long answer before it. ".repeat(400))).unwrap();
    sampler.replay(&tokens("turn <call>")).unwrap();
    let bound = text(&generate(&mut sampler, 52, 20));
    assert!(["up", "down"].contains(&bound.as_str()), "{bound}");
}

#[test]
fn a_grammar_that_does_not_allow_its_prefill_is_refused() {
    let grammar = Grammar { prefill: "<|im_start|>assistant\n".into(), ..Grammar::new("root ::= \"yes\"") };
    assert!(matches!(grammar.check(&vocab()), Err(GrammarError::Refused { .. })));
    let grammar = Grammar::new("root ::= \"<|im_start|>assistant\\n\" \"yes\"");
    let grammar = Grammar { prefill: "<|im_start|>assistant\n".into(), ..grammar };
    let mut sampler = sampler(&SamplerParams { grammar: Some(grammar), ..SamplerParams::greedy() });
    assert_eq!(text(&generate(&mut sampler, 53, 9)), "yes");
}
