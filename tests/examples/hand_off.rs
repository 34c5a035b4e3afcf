//! What two replicas on three hosts hand over, against what they should: `cargo run --release -p tests --example hand_off`, after
//! `cargo build --release`. Linux and root only.
//!
//! 200 requests, eight at once, of one replica that computes prompts and another, cut differently, that decodes; two stages each, one
//! host with a stage of both.
#![allow(clippy::print_stdout)] // its result

#[cfg(not(target_os = "linux"))]
fn main() {}

#[cfg(target_os = "linux")]
fn main() -> anyhow::Result<()> {
    use anyhow::ensure;
    use tests::hand_off::{expected, on_three_hosts, questions};
    use tests::lan::Lan;
    use tests::models::{SMOLLM2, model_path};
    use tests::reference::Reference;

    let questions = questions(200);
    let expected = expected(&mut Reference::load(&model_path(SMOLLM2)?)?, &questions)?;
    let lan = Lan::e2llm(3).build()?;
    let figures = on_three_hosts(&lan, (&questions, &expected), 8)?;
    let excess = figures.excess();
    println!("answers equal to the whole model's  {} of {}", figures.exact, figures.requests);
    println!("sequences that changed hands        {}", figures.moved);
    println!("bytes that travelled                {}", figures.bytes);
    let (least, most) = figures.due;
    println!("tokens x blocks x bytes of each     {least}, or up to {most} if not all moved");
    println!("that is more by                     {:.2} %", excess * 100.0);
    println!("mean time of a hand-off             {:.1} ms", figures.hand_off.as_secs_f64() * 1e3);
    println!("all requests                        {:.1} s", figures.took.as_secs_f64());
    ensure!(figures.exact == figures.requests, "some answers differ");
    ensure!(excess.abs() < 0.02, "the bytes differ by more than 2 %");
    Ok(())
}
