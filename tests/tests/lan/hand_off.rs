//! Two replicas that share a host, one for prompts and one for answers: the texts of the whole model, and no byte more than must
//! travel. `cargo run --release -p tests --example hand_off` is the long version.

use tests::hand_off::{expected, on_three_hosts, questions};
use tests::lan::Lan;
use tests::models::{SMOLLM2, model_path};
use tests::reference::Reference;

#[test]
fn prompts_and_answers_of_two_replicas_on_three_hosts_are_the_whole_models() {
    let Some(lan) = Lan::e2llm(3).build_or_skip().unwrap() else { return };
    let questions = questions(24);
    let expected =
        expected(&mut Reference::load(&model_path(SMOLLM2).unwrap()).unwrap(), &questions).unwrap();
    let figures = on_three_hosts(&lan, (&questions, &expected), 8).unwrap();
    eprintln!("{figures:?}");
    // On a busy host some wait so long for a connection that computing again seems faster.
    assert!(figures.exact == 24 && figures.moved > 12.0, "{figures:?}");
    assert!(figures.excess().abs() < 0.02, "{:.2} % more bytes than tokens have", figures.excess() * 100.0);
}
