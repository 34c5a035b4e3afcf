//! The rules of admission.

use proptest::prelude::*;

use super::*;
use crate::member::TokenRecord;
use crate::testing::{TestStore, newcomer};
use protocol::token::TokenSecret;

const NOW: Timestamp = Timestamp(1_800_000_000);
const TOKEN: TokenId = TokenId([1; 6]);
const CODE: Asking<'_> = Asking::WithCode("ab12");

fn key(number: u8) -> Fingerprint {
    Fingerprint([number; 32])
}

fn store() -> TestStore {
    let store = TestStore::new();
    let token = TokenRecord { id: TOKEN, made: NOW, expires: NOW, revoked: None, uses: 0 };
    store.add_token(&token, &TokenSecret([2; 16])).unwrap();
    store
}

fn certify(store: &Store, id: u128, number: u8) {
    let certificate = NewCertificate {
        fingerprint: Fingerprint([number; 32]),
        key: key(number),
        serial: number.to_string(),
        issued: Timestamp(NOW.0 + u64::from(number)),
        expires: Timestamp(NOW.0 + 1000),
    };
    store.certified(&Uuid::from_u128(id), &certificate, EventKind::NodeJoined).unwrap();
}

fn admitted(name: &str) -> Verdict {
    Verdict::Admitted(NodeId(name.to_owned()))
}

fn refusal(verdict: &Verdict) -> &'static str {
    match verdict {
        Verdict::Refused(reason) => reason,
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn a_token_admits_at_once_and_counts_its_uses() {
    let store = store();
    let token = Asking::WithToken(TOKEN);
    assert_eq!(store.ask(&newcomer(1, "desk"), &key(1), token, NOW).unwrap(), admitted("desk"));
    certify(&store, 1, 1);
    assert_eq!(store.ask(&newcomer(1, "desk"), &key(1), token, NOW).unwrap(), admitted("desk"));
    assert_eq!(store.ask(&newcomer(2, "desk"), &key(2), token, NOW).unwrap(), admitted("desk-2"));
    assert_eq!(store.tokens().unwrap()[0].uses, 3);
    let nodes = store.nodes().unwrap();
    assert_eq!(nodes.iter().map(|node| node.name.0.as_str()).collect::<Vec<_>>(), ["desk", "desk-2"]);
    assert!(nodes.iter().all(|node| node.state == MemberState::Approved));
    assert_eq!(nodes[0].certificate_expires, Some(Timestamp(NOW.0 + 1000)));
}

#[test]
fn nobody_takes_a_members_place_with_its_id_alone() {
    let store = store();
    store.ask(&newcomer(1, "desk"), &key(1), Asking::WithToken(TOKEN), NOW).unwrap();
    certify(&store, 1, 1);
    for asking in [Asking::WithToken(TOKEN), CODE, Asking::Freely] {
        let verdict = store.ask(&newcomer(1, "desk"), &key(9), asking, NOW).unwrap();
        assert!(refusal(&verdict).contains("another key"), "{asking:?}");
    }
    assert_eq!(store.ask(&newcomer(1, "desk"), &key(1), CODE, NOW).unwrap(), admitted("desk"), "its own key");
}

#[test]
fn a_host_without_a_token_waits_until_it_is_approved() {
    let store = store();
    let ask = |number, asking| store.ask(&newcomer(1, "desk"), &key(number), asking, NOW).unwrap();
    assert_eq!(ask(1, CODE), Verdict::Pending);
    assert_eq!(ask(1, CODE), Verdict::Pending);
    assert_eq!(store.nodes().unwrap()[0].code.as_deref(), Some("ab12"));
    assert!(refusal(&ask(2, CODE)).contains("somebody else"), "the code would be of another key");
    assert!(refusal(&ask(2, Asking::Freely)).contains("somebody else"));
    let id = Uuid::from_u128(1);
    assert_eq!(store.approve(&id).unwrap().state, MemberState::Approved);
    assert!(refusal(&ask(2, CODE)).contains("another key"));
    assert_eq!(ask(1, CODE), admitted("desk"));
    let asked = store.events_after(0, 100).unwrap();
    assert_eq!(asked.iter().filter(|event| event.kind == EventKind::NodeAsked).count(), 1, "told once");
    assert!(store.approve(&Uuid::from_u128(9)).unwrap_err().is_unknown_name());
}

#[test]
fn where_all_are_let_in_nobody_waits() {
    let store = store();
    assert_eq!(store.ask(&newcomer(1, "a"), &key(1), Asking::Freely, NOW).unwrap(), admitted("a"));
    store.ask(&newcomer(2, "b"), &key(2), CODE, NOW).unwrap();
    assert_eq!(store.ask(&newcomer(2, "b"), &key(2), Asking::Freely, NOW).unwrap(), admitted("b"));
}

#[test]
fn who_left_is_unknown_by_its_certificate_and_comes_back_only_if_somebody_wants_it() {
    let store = store();
    let ask = |asking| store.ask(&newcomer(1, "desk"), &key(1), asking, NOW).unwrap();
    ask(Asking::WithToken(TOKEN));
    certify(&store, 1, 1);
    let id = Uuid::from_u128(1);
    assert_eq!(store.holder(&key(1)).unwrap(), Some(id));
    assert_eq!(store.remove(&id).unwrap().state, MemberState::Left);
    assert_eq!(store.holder(&key(1)).unwrap(), None);
    for asking in [CODE, Asking::Freely] {
        assert!(refusal(&ask(asking)).contains("was removed"));
    }
    // Its name is another's now.
    store.ask(&newcomer(2, "desk"), &key(2), Asking::WithToken(TOKEN), NOW).unwrap();
    assert_eq!(store.approve(&id).unwrap().name.0, "desk-2");
    assert_eq!(ask(CODE), admitted("desk-2"));
    store.remove(&id).unwrap();
    store.ask(&newcomer(3, "desk"), &key(3), Asking::WithToken(TOKEN), NOW).unwrap();
    assert_eq!(
        ask(Asking::WithToken(TOKEN)),
        admitted("desk-3"),
        "it asks for the name that is taken, and another got the next"
    );
}

#[test]
fn hosts_that_wait_are_few_and_those_that_fell_silent_are_forgotten() {
    let store = store();
    let ask = |id: u32, now| store.ask(&newcomer(id.into(), "x"), &key(1), CODE, now).unwrap();
    for id in 1..=MOST_PENDING {
        assert_eq!(ask(id, NOW), Verdict::Pending);
    }
    assert!(refusal(&ask(1000, NOW)).contains("too many"));
    let later = Timestamp(NOW.0 + PENDING_SECONDS);
    assert_eq!(ask(7, later), Verdict::Pending);
    assert_eq!(ask(1000, Timestamp(later.0 + 1)), Verdict::Pending);
    assert_eq!(store.nodes().unwrap().len(), 2, "only those that asked again are left");
}

#[test]
fn old_certificates_are_forgotten_and_the_newest_are_not() {
    let store = store();
    store.ask(&newcomer(1, "desk"), &key(1), Asking::WithToken(TOKEN), NOW).unwrap();
    for number in 1..=12 {
        certify(&store, 1, number);
    }
    let id = Some(Uuid::from_u128(1));
    assert_eq!(store.holder(&key(12)).unwrap(), id);
    assert_eq!(store.holder(&key(5)).unwrap(), id);
    assert_eq!(store.holder(&key(4)).unwrap(), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Whatever hosts do, no two members have the same name, and nobody is a member whom nobody let in.
    #[test]
    fn names_are_unique_and_members_were_let_in(
        steps in proptest::collection::vec((0..5_u8, 1..5_u128, 0..3_u8), 1..40),
    ) {
        let store = store();
        let mut let_in = std::collections::BTreeSet::new();
        for (step, id, number) in steps {
            let uuid = Uuid::from_u128(id);
            let ask = |asking| store.ask(&newcomer(id, "desk"), &key(number), asking, NOW).unwrap();
            match step {
                0 => if matches!(ask(Asking::WithToken(TOKEN)), Verdict::Admitted(_)) { let_in.insert(id); },
                1 => if matches!(ask(Asking::Freely), Verdict::Admitted(_)) { let_in.insert(id); },
                2 => prop_assert!(!matches!(ask(CODE), Verdict::Admitted(_)) || let_in.contains(&id)),
                3 => if store.approve(&uuid).is_ok() { let_in.insert(id); },
                _ => if store.remove(&uuid).is_ok() { let_in.remove(&id); },
            }
            let members: Vec<NodeRecord> =
                store.nodes().unwrap().into_iter().filter(|node| node.state == MemberState::Approved).collect();
            let names: std::collections::BTreeSet<&str> = members.iter().map(|node| node.name.0.as_str()).collect();
            prop_assert_eq!(names.len(), members.len());
            prop_assert!(members.iter().all(|node| let_in.contains(&node.id.as_u128())));
        }
    }
}
