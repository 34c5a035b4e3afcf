//! `docs/architectures.md`.

use std::fmt::Write as _;

use super::{Architecture, HiddenInput, Recurrence, SizeRule, SlidingWindow, Support, TABLE, WithoutSliding};

const HEAD: &str = "\
# Architectures

<!-- Generated from `gguf::architectures` by `cargo xtask docs`; do not edit. -->

Shoal cuts a model into slices that stock llama.cpp runs. Whether a chain of slices computes what the whole model does
depends on the architecture.

";

/// The page, in Markdown.
pub fn markdown() -> String {
    let mut page = String::from(HEAD);
    let certified: Vec<_> = of(|support| matches!(support, Support::Certified)).collect();
    let _ = writeln!(
        page,
        "## Certified\n\nA test builds a small random model of each, cuts it at every place the table allows, and finds \
         tokens equal and logits bit-equal to the whole model's on the CPU.\n\n\
         | architecture | limits on cuts | stated by slices | notes |\n| --- | --- | --- | --- |"
    );
    for architecture in certified {
        let _ = writeln!(
            page,
            "| {} | {} | {} | {} |",
            architecture.name,
            limits(architecture),
            stated(architecture),
            architecture.note
        );
    }
    let uncertified: Vec<_> =
        of(|support| matches!(support, Support::Uncertified)).map(|row| row.name).collect();
    let _ = writeln!(
        page,
        "\n## Uncertified\n\nNothing known stands against cutting these, but no test proves it: `--allow-uncertified` \
         runs them.\n\n{}\n",
        uncertified.join(", ")
    );
    let _ = writeln!(page, "## Refused\n\n| architecture | reason |\n| --- | --- |");
    for architecture in of(|support| matches!(support, Support::Refused(_))) {
        if let Support::Refused(reason) = architecture.support {
            let _ = writeln!(page, "| {} | {reason} |", architecture.name);
        }
    }
    page
}

fn of(matches: fn(Support) -> bool) -> impl Iterator<Item = &'static Architecture> {
    TABLE.iter().filter(move |architecture| matches(architecture.support))
}

fn limits(architecture: &Architecture) -> String {
    let mut limits = Vec::new();
    if let Some(step) = architecture.start_multiple {
        limits.push(format!("only after every {step}th block"));
    }
    if architecture.recurrence != Recurrence::None {
        limits.push("each slice needs both kinds of block".to_owned());
    }
    if let SlidingWindow::Pattern { without: WithoutSliding::Impossible, .. } = architecture.sliding_window {
        limits.push("each slice needs a block with a sliding window".to_owned());
    }
    match architecture.size_rule {
        SizeRule::None | SizeRule::MiniCpm => {}
        SizeRule::Constant { blocks } => {
            limits.push(format!("models of {blocks} blocks are not cut, no slice has {blocks}"));
        }
        SizeRule::Deepseek2 => limits.push("no slice of 26 or 27 blocks, unless a lite model's".to_owned()),
    }
    if limits.is_empty() { "none".to_owned() } else { limits.join("; ") }
}

fn stated(architecture: &Architecture) -> String {
    let mut stated = Vec::new();
    if architecture.sliding_window != SlidingWindow::None {
        stated.push("sliding-window pattern");
    }
    if architecture.recurrence != Recurrence::None {
        stated.push("recurrent blocks");
    }
    if architecture.hidden_input == HiddenInput::MultiRope {
        stated.push("M-RoPE sections");
    }
    match architecture.size_rule {
        SizeRule::None | SizeRule::Constant { .. } => {}
        SizeRule::MiniCpm => stated.push("residual scale"),
        SizeRule::Deepseek2 => stated.push("query compression, expert gating"),
    }
    if stated.is_empty() { "nothing more".to_owned() } else { stated.join(", ") }
}
