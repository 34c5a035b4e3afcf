//! The desk under every order of events, and what it promises in particular.

use proptest::prelude::*;

use super::*;
use crate::router::PolicyName;

const SECOND: Duration = Duration::from_secs(1);

fn order(prompt: u32) -> Order {
    Order { prompt, most_output: 64, prefix: PromptPrefix::default(), company: Company::Any }
}

fn apart(prompt: u32) -> Order {
    Order { company: Company::Apart, ..order(prompt) }
}

/// A desk of replicas with so many slots, which serve in epoch 1.
fn desk(slots: &[u32], limit: usize) -> Desk {
    let mut desk = Desk::new(PolicyName::Jsq.policy(0), limit);
    for &slots in slots {
        let replica = desk.add(slots, PredictedRates::default());
        desk.serve(replica, Some(Epoch(1)), Duration::ZERO);
    }
    desk
}

fn arrive(desk: &mut Desk, order: Order) -> Ticket {
    desk.arrive(order, Duration::ZERO).unwrap().ticket
}

#[test]
fn requests_spread_over_replicas_alike_and_then_wait_in_order() {
    let mut desk = desk(&[2, 2], 8);
    let tickets: Vec<_> = (0..6).map(|_| arrive(&mut desk, order(10))).collect();
    let places: Vec<_> = tickets.iter().map(|&ticket| desk.place(ticket).unwrap()).collect();
    let seats = places.iter().filter(|place| matches!(place, Place::Seated { replica: 0 })).count();
    assert_eq!(seats, 2, "{places:?}");
    assert_eq!(desk.waiting(), 2);
    let Place::Seated { replica } = places[0] else { panic!("{places:?}") };
    desk.take_moved();
    desk.leave(tickets[0], Leaving::Done, SECOND);
    let next = desk.take_moved();
    assert!(next == [tickets[4]] || next == [tickets[5]], "one of the two that wait, {next:?}");
    assert_eq!(desk.place(next[0]), Some(Place::Seated { replica }));
}

#[test]
fn case_25_the_bound_is_for_those_who_would_wait() {
    let mut desk = desk(&[1], 1);
    let (first, _) = (arrive(&mut desk, order(10)), arrive(&mut desk, order(10)));
    let full = desk.arrive(order(10), SECOND).unwrap_err();
    assert_eq!((full.waiting, full.limit), (1, 1));
    assert!(full.wait > 0.0 && full.wait.is_finite(), "{full:?}");
    desk.leave(first, Leaving::Done, SECOND);
    assert!(desk.arrive(order(10), SECOND).is_ok());
}

#[test]
fn without_a_line_only_a_free_slot_lets_in() {
    let mut desk = desk(&[1], 0);
    arrive(&mut desk, order(10));
    assert!(desk.arrive(order(10), SECOND).is_err());
}

#[test]
fn who_waits_for_a_lost_replica_is_bound_to_another() {
    let mut desk = desk(&[1, 1], 8);
    let tickets: Vec<_> = (0..4).map(|_| arrive(&mut desk, order(10))).collect();
    desk.serve(0, None, SECOND);
    for &ticket in &tickets {
        assert!(!matches!(desk.place(ticket), Some(Place::Waiting { replica: 0, .. } | Place::Parked)));
    }
    desk.serve(1, None, SECOND);
    assert_eq!(desk.waiting(), 2);
    assert_eq!(desk.place(tickets[3]), Some(Place::Parked));
    desk.serve(0, Some(Epoch(2)), SECOND);
    assert_eq!(desk.place(tickets[2]), Some(Place::Seated { replica: 0 }), "the oldest of those who wait");
}

#[test]
fn a_request_that_lost_its_replica_goes_before_younger_ones() {
    let mut desk = desk(&[1, 1], 8);
    let on: Vec<_> = (0..2).map(|_| arrive(&mut desk, order(10))).collect();
    let young = arrive(&mut desk, order(10));
    desk.serve(0, None, SECOND);
    let of_zero = on.iter().copied().find(|&t| desk.place(t) == Some(Place::Seated { replica: 0 })).unwrap();
    desk.lost(of_zero, order(15), SECOND);
    assert_eq!(desk.place(of_zero), Some(Place::Waiting { replica: 1, ahead: 0 }));
    assert_eq!(desk.place(young), Some(Place::Waiting { replica: 1, ahead: 1 }));
}

#[test]
fn slots_of_a_new_incarnation_are_free_although_the_old_ones_holders_do_not_know_yet() {
    let mut desk = desk(&[1], 8);
    let old = arrive(&mut desk, order(10));
    desk.serve(0, Some(Epoch(2)), SECOND);
    let new = arrive(&mut desk, order(10));
    assert_eq!(desk.place(new), Some(Place::Seated { replica: 0 }));
    assert!(desk.has_lost_its_slot(old) && !desk.has_lost_its_slot(new));
    // Late news of the old one touch nobody.
    desk.started(old, 3);
    desk.token(old, SECOND);
    desk.leave(old, Leaving::Early, SECOND);
    assert_eq!(desk.loads().map(|load| (load.waiting, load.held)).next(), Some((0, 1)));
}

#[test]
fn a_doubted_replica_that_goes_on_in_its_epoch_still_has_its_requests() {
    let mut desk = desk(&[1], 8);
    arrive(&mut desk, order(10));
    desk.serve(0, None, SECOND);
    desk.serve(0, Some(Epoch(1)), SECOND);
    let waits = arrive(&mut desk, order(10));
    assert_eq!(desk.place(waits), Some(Place::Waiting { replica: 0, ahead: 0 }));
}

#[test]
fn requests_that_must_be_apart_never_share_a_replica_until_they_have_a_token() {
    let mut desk = desk(&[4, 4], 8);
    let suspects: Vec<_> = (0..3).map(|_| arrive(&mut desk, apart(10))).collect();
    assert_eq!(desk.place(suspects[0]), Some(Place::Seated { replica: 0 }));
    assert_eq!(desk.place(suspects[1]), Some(Place::Seated { replica: 1 }));
    assert_eq!(desk.place(suspects[2]), Some(Place::Parked));
    let innocent = arrive(&mut desk, order(10));
    assert!(matches!(desk.place(innocent), Some(Place::Seated { .. })));
    desk.token(suspects[1], SECOND);
    assert_eq!(desk.place(suspects[2]), Some(Place::Seated { replica: 1 }));
}

#[test]
fn the_faster_replica_gets_more_once_it_is_known_to_be() {
    let mut desk = desk(&[4, 4], 8);
    let mut now = Duration::ZERO;
    // Replica 0 takes ten times as long for everything.
    for _ in 0..20 {
        for _ in 0..2 {
            let ticket = desk.arrive(order(100), now).unwrap().ticket;
            let Some(Place::Seated { replica }) = desk.place(ticket) else { panic!("a slot is free") };
            let each = if replica == 0 { SECOND } else { SECOND / 10 };
            for _ in 0..8 {
                now += each;
                desk.token(ticket, now);
            }
            desk.leave(ticket, Leaving::Done, now);
        }
    }
    let replicas = (0..4).map(|_| {
        let ticket = desk.arrive(order(100), now).unwrap().ticket;
        desk.place(ticket).unwrap()
    });
    assert!(replicas.collect::<Vec<_>>().iter().all(|place| *place == Place::Seated { replica: 1 }));
}

#[test]
fn a_wait_is_foretold_from_the_work_ahead() {
    let mut desk = desk(&[1], 8);
    let idle = desk.arrive(order(100), Duration::ZERO).unwrap();
    assert!(idle.wait < 0.01, "{idle:?}");
    let second = desk.arrive(order(100), Duration::ZERO).unwrap();
    let third = desk.arrive(order(100), Duration::ZERO).unwrap();
    assert!(second.wait > 1.0 && third.wait > 1.5 * second.wait, "{second:?} {third:?}");
    assert_eq!([idle.position, second.position, third.position], [0, 1, 2]);
    // While nobody serves, the two wait on, and others behind them.
    desk.serve(0, None, SECOND);
    assert_eq!(desk.arrive(order(100), SECOND).unwrap().position, 3);
}

#[test]
fn a_prompt_comes_back_to_the_replica_that_has_its_beginning() {
    let mut desk = Desk::new(PolicyName::PrefixAffinity.policy(0), 8);
    for _ in 0..3 {
        let replica = desk.add(2, PredictedRates::default());
        desk.serve(replica, Some(Epoch(1)), Duration::ZERO);
    }
    let prompt: Vec<i32> = (0..200).collect();
    let with_prefix =
        |prompt: &[i32]| Order { prefix: PromptPrefix::of(prompt), ..order(prompt.len() as u32) };
    let other = arrive(&mut desk, order(10));
    let first = arrive(&mut desk, with_prefix(&prompt));
    let Some(Place::Seated { replica }) = desk.place(first) else { panic!("a slot is free") };
    assert_ne!(desk.place(other), Some(Place::Seated { replica }));
    desk.token(first, Duration::ZERO);
    desk.leave(first, Leaving::Done, Duration::ZERO);
    let again = arrive(&mut desk, with_prefix(&[&prompt[..], &[7; 50]].concat()));
    assert_eq!(desk.place(again), Some(Place::Seated { replica }));
}

#[test]
fn a_replica_that_is_drained_keeps_its_requests_and_gets_no_more() {
    let mut desk = desk(&[1, 1], 8);
    let tickets: Vec<_> = (0..4).map(|_| arrive(&mut desk, order(10))).collect();
    let place = |desk: &Desk, i: usize| desk.place(tickets[i]).unwrap();
    let drained = (0..2).find(|&i| place(&desk, i) == Place::Seated { replica: 0 }).unwrap();
    desk.drain(0, SECOND);
    assert_eq!(place(&desk, drained), Place::Seated { replica: 0 });
    assert!((2..4).all(|i| matches!(place(&desk, i), Place::Waiting { replica: 1, .. })));
    // Its agent goes on saying that it serves.
    desk.serve(0, Some(Epoch(1)), SECOND);
    desk.token(tickets[drained], SECOND);
    desk.leave(tickets[drained], Leaving::Done, SECOND);
    assert!((2..4).all(|i| matches!(place(&desk, i), Place::Waiting { replica: 1, .. })));
    assert_eq!(desk.loads().map(|load| (load.waiting, load.held)).next(), Some((0, 0)));
    desk.resume(0);
    desk.serve(0, Some(Epoch(1)), SECOND);
    assert_eq!(place(&desk, 2), Place::Seated { replica: 0 });
}

#[test]
fn who_has_a_slot_of_a_replica_that_is_removed_has_lost_it_and_the_next_has_another_number() {
    let mut desk = desk(&[1], 8);
    let ticket = arrive(&mut desk, order(10));
    desk.remove(0, SECOND);
    assert_eq!(desk.add(1, PredictedRates::default()), 1);
    desk.serve(0, Some(Epoch(9)), SECOND);
    desk.serve(1, Some(Epoch(2)), SECOND);
    let next = arrive(&mut desk, order(10));
    assert_eq!(desk.place(next), Some(Place::Seated { replica: 1 }));
    desk.lost(ticket, order(12), SECOND);
    assert_eq!(desk.place(ticket), Some(Place::Waiting { replica: 1, ahead: 0 }));
    desk.leave(next, Leaving::Done, SECOND);
    assert_eq!(desk.place(ticket), Some(Place::Seated { replica: 1 }));
}

/// Replica 0 prefills, the others decode.
fn with_roles(slots: &[u32]) -> Desk {
    let mut desk = desk(slots, 16);
    for replica in 0..slots.len() {
        desk.set_role(replica, if replica == 0 { Role::Prefill } else { Role::Decode }, Duration::ZERO);
    }
    desk
}

#[test]
fn prompts_go_to_those_who_prefill_and_then_wait_in_one_line_for_whoever_decodes() {
    let mut desk = with_roles(&[4, 1, 1]);
    let tickets: Vec<_> = (0..4).map(|_| arrive(&mut desk, order(10))).collect();
    assert!(tickets.iter().all(|&ticket| desk.place(ticket) == Some(Place::Seated { replica: 0 })));
    // First tokens in another order than arrivals.
    for &i in &[1, 0, 3, 2] {
        desk.token(tickets[i], SECOND);
    }
    assert_eq!(desk.place(tickets[1]), Some(Place::Moving { from: 0, to: 1 }));
    assert_eq!(desk.place(tickets[0]), Some(Place::Moving { from: 0, to: 2 }));
    assert_eq!(desk.place(tickets[3]), Some(Place::Prefilled { replica: 0, ahead: 0 }));
    assert_eq!(desk.place(tickets[2]), Some(Place::Prefilled { replica: 0, ahead: 1 }));
    // The slot at the prefill replica is held until the KV has arrived.
    assert_eq!(desk.loads().map(|load| load.held).collect::<Vec<_>>(), [4, 1, 1]);
    assert!(!desk.handed_over(tickets[0], 1, Kv::Arrived, SECOND), "another slot is reserved for it");
    assert!(desk.handed_over(tickets[0], 2, Kv::Arrived, SECOND));
    assert_eq!(desk.place(tickets[0]), Some(Place::Seated { replica: 2 }));
    assert_eq!(desk.loads().map(|load| load.held).collect::<Vec<_>>(), [3, 1, 1]);
    desk.leave(tickets[0], Leaving::Done, SECOND);
    assert_eq!(
        desk.place(tickets[3]),
        Some(Place::Moving { from: 0, to: 2 }),
        "whoever came to the line first"
    );
    assert_eq!(desk.place(tickets[2]), Some(Place::Prefilled { replica: 0, ahead: 0 }));
}

#[test]
fn where_one_role_has_no_replica_the_other_does_both() {
    let mut desk = with_roles(&[2, 2]);
    desk.serve(1, None, SECOND);
    let stays = arrive(&mut desk, order(10));
    desk.token(stays, SECOND);
    assert_eq!(desk.place(stays), Some(Place::Seated { replica: 0 }), "nobody decodes");
    assert_eq!(desk.errand(stays), Errand::Whole);
    desk.serve(0, None, SECOND);
    desk.serve(1, Some(Epoch(2)), SECOND);
    let goes = arrive(&mut desk, order(10));
    assert_eq!(desk.place(goes), Some(Place::Seated { replica: 1 }), "nobody prefills");
}

#[test]
fn a_request_that_was_promised_another_replica_goes_on_where_it_is_if_roles_flip_meanwhile() {
    let mut desk = with_roles(&[2, 1]);
    let [early, late] = [0, 1].map(|_| arrive(&mut desk, order(10)));
    assert_eq!(desk.errand(early), Errand::Prompt);
    desk.token(early, SECOND);
    desk.set_role(0, Role::Mixed, SECOND);
    assert_eq!(desk.place(early), Some(Place::Moving { from: 0, to: 1 }), "on its way");
    desk.token(late, SECOND);
    assert_eq!(desk.place(late), Some(Place::Seated { replica: 0 }));
    assert_eq!(desk.errand(late), Errand::Whole);
    assert_eq!(desk.members[0].prefilling, 1, "its prompt is looked at again");
    // What has all its tokens in one place stays there, whatever that place becomes.
    desk.token(late, SECOND);
    desk.set_role(0, Role::Prefill, SECOND);
    desk.token(late, SECOND);
    assert_eq!(desk.place(late), Some(Place::Seated { replica: 0 }));
}

#[test]
fn who_waits_to_be_decoded_counts_neither_as_fast_nor_as_slow() {
    let mut desk = with_roles(&[2, 1]);
    let tickets = [0, 1].map(|_| arrive(&mut desk, order(10)));
    tickets.iter().for_each(|&ticket| desk.token(ticket, SECOND));
    let before: Vec<_> = desk.loads().map(|load| load.tpot_full).collect();
    for seconds in 2..100 {
        desk.started(tickets[0], 0);
        let passing = arrive(&mut desk, order(10));
        desk.leave(passing, Leaving::Early, SECOND * seconds);
    }
    assert_eq!(desk.loads().map(|load| load.tpot_full).collect::<Vec<_>>(), before);
    // Both slots are taken by those who wait for the only slot that decodes.
    let waits = desk.arrive(order(10), SECOND * 100).unwrap();
    assert!(waits.wait > 1.0, "{waits:?}");
}

#[test]
fn a_request_whose_reserved_slot_is_lost_gets_another_or_stays() {
    let mut desk = with_roles(&[2, 1, 1]);
    let ticket = arrive(&mut desk, order(10));
    desk.token(ticket, SECOND);
    assert_eq!(desk.place(ticket), Some(Place::Moving { from: 0, to: 1 }));
    desk.serve(1, None, SECOND);
    assert_eq!(desk.place(ticket), Some(Place::Moving { from: 0, to: 2 }));
    desk.serve(2, None, SECOND);
    assert_eq!(desk.place(ticket), Some(Place::Seated { replica: 0 }));
    assert!(!desk.handed_over(ticket, 2, Kv::Arrived, SECOND), "late news touch nobody");
    assert_eq!(desk.place(ticket), Some(Place::Seated { replica: 0 }));
    assert_eq!(desk.errand(ticket), Errand::Whole);
}

#[test]
fn on_a_replica_that_does_both_the_older_of_both_lines_goes_first() {
    let mut desk = desk(&[1, 1], 16);
    desk.set_role(0, Role::Prefill, Duration::ZERO);
    desk.serve(0, None, Duration::ZERO);
    let running = arrive(&mut desk, order(10));
    desk.serve(0, Some(Epoch(2)), Duration::ZERO);
    // A prefill replica never looks long, so this one is at replica 0.
    let prompt = arrive(&mut desk, order(10));
    assert_eq!(desk.place(prompt), Some(Place::Seated { replica: 0 }));
    desk.token(prompt, SECOND);
    assert_eq!(desk.place(prompt), Some(Place::Prefilled { replica: 0, ahead: 0 }));
    desk.serve(0, None, SECOND);
    let younger = arrive(&mut desk, order(10));
    assert_eq!(desk.place(younger), Some(Place::Waiting { replica: 1, ahead: 0 }));
    desk.leave(running, Leaving::Done, SECOND);
    assert_eq!(desk.place(prompt), Some(Place::Moving { from: 0, to: 1 }));
    assert_eq!(desk.place(younger), Some(Place::Waiting { replica: 1, ahead: 0 }));
}

#[derive(Debug, Clone)]
enum Act {
    Arrive { prompt: u32, apart: bool },
    Started(usize),
    Token(usize),
    Lost(usize),
    Leave(usize),
    HandedOver(usize, usize, Kv),
    Whole(usize),
    Serve(usize),
    Fall(usize),
    Role(usize, Role),
    Drain(usize),
    Resume(usize),
    Remove(usize),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => (1_u32..500, any::<bool>()).prop_map(|(prompt, apart)| Act::Arrive { prompt, apart }),
        2 => any::<usize>().prop_map(Act::Started),
        6 => any::<usize>().prop_map(Act::Token),
        1 => any::<usize>().prop_map(Act::Lost),
        2 => any::<usize>().prop_map(Act::Leave),
        3 => (any::<usize>(), any::<usize>(), prop::sample::select(vec![Kv::Arrived, Kv::Missing]))
            .prop_map(|(n, to, kv)| Act::HandedOver(n, to, kv)),
        1 => any::<usize>().prop_map(Act::Whole),
        1 => (any::<usize>(), prop::sample::select(vec![Role::Prefill, Role::Decode, Role::Mixed]))
            .prop_map(|(n, role)| Act::Role(n, role)),
        1 => any::<usize>().prop_map(Act::Serve),
        1 => any::<usize>().prop_map(Act::Fall),
        1 => any::<usize>().prop_map(Act::Drain),
        1 => any::<usize>().prop_map(Act::Resume),
        1 => any::<usize>().prop_map(Act::Remove),
    ]
}

/// What holds between any two calls, counted anew from the entries.
fn check(desk: &Desk) {
    let mut waiting = 0;
    for (i, member) in desk.members.iter().enumerate() {
        let sits = |entry: &&Entry| {
            entry.spot == Spot::Slot(i, member.epoch) || entry.decode == Decode::Reserved(i, member.epoch)
        };
        let lines = |entry: &&Entry| entry.spot == Spot::Line(i);
        let seated: Vec<_> = desk.entries.values().filter(sits).collect();
        let line: Vec<_> = desk.entries.values().filter(lines).collect();
        waiting += line.len();
        assert_eq!((member.held, member.line.len()), (seated.len(), line.len()));
        let paused = seated.iter().filter(|entry| entry.decode != Decode::Here).count();
        let prefilling = seated.iter().filter(|entry| entry.prefill.is_some()).count();
        assert_eq!((member.paused, member.prefilling), (paused, prefilling));
        let any_decodes = desk.serving().any(|member| member.role != Role::Prefill);
        assert_eq!(member.generates, member.role != Role::Prefill || !any_decodes);
        assert!(member.held <= member.slots);
        assert!(member.serving.is_some() || line.is_empty(), "nobody waits where nobody serves");
        assert!(
            member.serving.is_none() || member.standing == Standing::Open,
            "nobody is sent where one drains"
        );
        assert!(member.standing != Standing::Gone || member.held == 0, "nobody is where nothing is");
        assert!(line.is_empty() || !member.has_free_slot(), "nobody waits beside a free slot");
        let apart = seated.iter().chain(&line).filter(|entry| entry.order.company == Company::Apart).count();
        assert_eq!(member.apart, apart);
        assert!(apart <= 1, "those apart never meet");
        let view = member.view(i, &order(1), desk.mean_output, Duration::MAX);
        assert_eq!(view.tokens, seated.iter().chain(&line).map(|entry| entry.tokens).sum::<u64>());
        assert_eq!(view.waiting, line.len() + seated.iter().filter(|entry| entry.prefill.is_some()).count());
        let is_mixed_use = |of: Role| desk.serving().all(|member| member.role == of);
        assert!(member.role != Role::Decode || line.is_empty() || is_mixed_use(Role::Decode));
        let decodes = member.role != Role::Prefill && member.has_free_slot();
        assert!(!decodes || desk.central.is_empty(), "nobody waits beside a free decode slot");
        assert!(view.work().is_finite() && view.work() >= 0.0);
    }
    assert_eq!(desk.waiting, waiting + desk.parked.len());
    let wanted = desk.entries.iter().filter(|(_, entry)| entry.decode == Decode::Wanted);
    assert_eq!(wanted.count(), desk.central.len());
    for (ticket, entry) in desk.entries.iter().filter(|(_, entry)| entry.decode != Decode::Here) {
        assert!(matches!(entry.spot, Spot::Slot(..)) && entry.prefill.is_none(), "{ticket:?}: {entry:?}");
    }
    let any_prefills = desk.serving().any(|member| member.role != Role::Decode);
    let prefills = |member: &&Member| member.role != Role::Decode || !any_prefills;
    let serves = desk.serving().filter(prefills).any(|member| member.apart == 0);
    assert!(desk.parked.is_empty() || !serves, "nobody is parked beside one who serves");
}

proptest! {
    #[test]
    fn whatever_happens_the_desk_keeps_its_books(
        acts in prop::collection::vec(act(), 1..200),
        slots in prop::collection::vec(1_u32..4, 1..4),
        policy in 0..PolicyName::ALL.len(),
    ) {
        let mut desk = Desk::new(PolicyName::ALL[policy].policy(7), 4);
        for &slots in &slots {
            desk.add(slots, PredictedRates::default());
        }
        let (mut tickets, mut now, mut epoch): (Vec<Ticket>, _, _) = (Vec::new(), Duration::ZERO, 0);
        for act in acts {
            now += Duration::from_millis(40);
            let pick = |n: usize, len: usize| (len > 0).then(|| n % len);
            match act {
                Act::Arrive { prompt, apart: is_apart } => {
                    let order = if is_apart { apart(prompt) } else { order(prompt) };
                    let waiting = desk.waiting();
                    match desk.arrive(order, now) {
                        Ok(arrival) => tickets.push(arrival.ticket),
                        Err(full) => prop_assert!(waiting >= full.limit),
                    }
                }
                Act::Started(n) => {
                    if let Some(n) = pick(n, tickets.len()) { desk.started(tickets[n], 5) }
                }
                Act::Token(n) => {
                    if let Some(n) = pick(n, tickets.len()) { desk.token(tickets[n], now) }
                }
                Act::Lost(n) => {
                    if let Some(n) = pick(n, tickets.len()) { desk.lost(tickets[n], order(9), now) }
                }
                Act::Leave(n) => {
                    if let Some(n) = pick(n, tickets.len()) {
                        let leaving = if n % 2 == 0 { Leaving::Done } else { Leaving::Early };
                        desk.leave(tickets.swap_remove(n), leaving, now);
                    }
                }
                Act::HandedOver(n, to, kv) => {
                    if let Some(n) = pick(n, tickets.len()) {
                        desk.handed_over(tickets[n], to % slots.len(), kv, now);
                    }
                }
                Act::Whole(n) => {
                    if let Some(n) = pick(n, tickets.len()) { desk.do_whole(tickets[n]) }
                }
                Act::Role(n, role) => desk.set_role(n % slots.len(), role, now),
                Act::Serve(n) => {
                    epoch += 1;
                    desk.serve(n % slots.len(), Some(Epoch(epoch)), now);
                }
                Act::Fall(n) => desk.serve(n % slots.len(), None, now),
                Act::Drain(n) => desk.drain(n % slots.len(), now),
                Act::Resume(n) => desk.resume(n % slots.len()),
                // Another takes its place, under a number of its own.
                Act::Remove(n) => {
                    desk.remove(n % slots.len(), now);
                    desk.add(slots[n % slots.len()], PredictedRates::default());
                }
            }
            check(&desk);
        }
        for ticket in tickets {
            desk.leave(ticket, Leaving::Early, now);
        }
        check(&desk);
        prop_assert_eq!(desk.waiting(), 0);
    }
}
