//! Makes a model that must call a tool begin with the call.
//!
//! llama.cpp's grammar for a required call lets the model talk before it, as long as it likes, and small models like to
//! talk until no token is left. What begins a call is what triggers the grammar of an optional one, so that is
//! rendered, too, and its trigger is put at the end of the prompt. Models that think first are left alone.

use llama::chat::{ChatError, ChatPrompt, ChatRequest, ChatTemplates};
use llama::grammar::Grammar;
use llama::sampler::{Sampler, SamplerParams};
use llama::{Special, Vocab};

/// Characters that stand for more than themselves in a trigger's pattern.
const SPECIAL_IN_PATTERNS: &str = ".^$|()*+?[]{}\\";

/// Whether a tool, or a certain one, must be called.
pub(super) fn is_required(chat: &ChatRequest) -> bool {
    chat.tool_choice.as_ref().is_some_and(|choice| choice == "required" || choice.is_object())
}

/// Puts what begins a call at the end of `prompt`, if `chat` requires a call and it can be told what begins one.
/// The text is a part of the answer, and is returned.
pub(super) fn begin(
    templates: &ChatTemplates,
    vocab: &Vocab,
    chat: &ChatRequest,
    prompt: &mut ChatPrompt,
) -> Result<String, ChatError> {
    let Some(grammar) = prompt.grammar.as_mut().filter(|grammar| is_required(chat) && !grammar.lazy) else {
        return Ok(String::new());
    };
    let optional = ChatRequest { tool_choice: Some("auto".into()), ..chat.clone() };
    let optional = templates.apply(&optional)?;
    let Some(beginning) = optional.grammar.and_then(|optional| beginning(vocab, &optional)) else {
        return Ok(String::new());
    };
    let begun = Grammar { prefill: format!("{}{beginning}", grammar.prefill), ..grammar.clone() };
    // Tells whether the grammar goes on from there.
    let params = SamplerParams { grammar: Some(begun.clone()), ..SamplerParams::greedy() };
    if Sampler::new(vocab, &params).is_err() {
        tracing::debug!("the grammar of a required call does not begin with the trigger of an optional one");
        return Ok(String::new());
    }
    *grammar = begun;
    prompt.prompt.push_str(&beginning);
    Ok(beginning)
}

/// The one text that triggers a lazy grammar.
fn beginning(vocab: &Vocab, optional: &Grammar) -> Option<String> {
    if !optional.lazy || optional.thinking.is_some() {
        return None;
    }
    match (&optional.trigger_patterns[..], &optional.trigger_tokens[..]) {
        ([pattern], []) => unescaped(pattern),
        ([], [token]) => String::from_utf8(vocab.token_bytes(*token, Special::Control).ok()?).ok(),
        _ => None,
    }
}

/// The text that a pattern matches, if it matches only one.
fn unescaped(pattern: &str) -> Option<String> {
    let mut text = String::with_capacity(pattern.len());
    let mut characters = pattern.chars();
    while let Some(character) = characters.next() {
        match character {
            '\\' => text.push(characters.next().filter(|next| SPECIAL_IN_PATTERNS.contains(*next))?),
            special if SPECIAL_IN_PATTERNS.contains(special) => return None,
            plain => text.push(plain),
        }
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_pattern_of_one_text_is_a_beginning() {
        assert_eq!(unescaped(r"<tool_call>\{").as_deref(), Some("<tool_call>{"));
        for pattern in [r"<tool_call>\s*", "a|b", "^a", r"a\"] {
            assert_eq!(unescaped(pattern), None, "{pattern}");
        }
    }
}
