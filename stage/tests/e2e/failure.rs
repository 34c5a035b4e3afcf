//! What goes wrong is refused, reported and survived.

use std::time::Duration;

use protocol::tls::ClusterCa;
use protocol::v1;
use stage::Worker;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::Instant;
use tonic::{Code, Request};

use crate::replica::{PATIENCE, Replica, SHAPE, Shape, configs, greedy, start};
use crate::whole::{Slices, Whole, prompts};

/// Field cases 9 and 19.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_frees_its_slot_and_leaves_nothing_behind() {
    let slices = Slices::cut(&[15]);
    let shape = Shape { slots: 1, ..SHAPE };
    let mut whole = Whole::load(&slices, shape.n_ctx);
    let prompts = prompts(&whole, 3);
    let expected = whole.greedy(&prompts[2], 12);
    let (replica, _workers) = start(&slices, &[&[0], &[1]], shape).await;
    for _ in 0..5 {
        let mut running = replica.start(greedy(&prompts[0], 200)).await.unwrap();
        running.until_tokens(3).await;
        let queued = replica.start(greedy(&prompts[1], 200)).await.unwrap();
        let third = replica.start(greedy(&prompts[2], 12)).await.unwrap();
        assert_eq!(replica.engine_status().await.queued, 2);
        drop(queued);
        drop(running);
        let third = third.rest().await.unwrap();
        assert_eq!(third.tokens, expected, "{third:?}");
        replica.wait_until_idle().await;
    }
}

/// Field cases 20, 21 and 25.
#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_served_is_refused_before_the_stream_begins() {
    let slices = Slices::cut(&[15]);
    let shape = Shape { slots: 1, queue_limit: 1, n_ctx: 64, ..SHAPE };
    let (replica, _workers) = start(&slices, &[&[0], &[1]], shape).await;
    let code = async |request| replica.start(request).await.err().map(|status| status.code());
    assert_eq!(code(greedy(&[1; 65], 1)).await, Some(Code::OutOfRange));
    assert_eq!(code(greedy(&[1; 64], 0)).await, Some(Code::InvalidArgument));
    assert_eq!(code(greedy(&[49152], 1)).await, Some(Code::InvalidArgument));
    let mut running = replica.start(greedy(&[5; 9], 50)).await.unwrap();
    running.until_tokens(1).await;
    let queued = replica.start(greedy(&[6; 9], 2)).await.unwrap();
    assert_eq!(code(greedy(&[7; 9], 1)).await, Some(Code::ResourceExhausted));
    drop(running);
    assert_eq!(queued.rest().await.unwrap().tokens.len(), 2);
}

/// Field case 24.
#[tokio::test(flavor = "multi_thread")]
async fn a_generation_that_reaches_its_slots_end_finishes_alone() {
    let slices = Slices::cut(&[15]);
    let shape = Shape { slots: 2, n_ctx: 64, ..SHAPE };
    let mut whole = Whole::load(&slices, 256);
    let prompts = prompts(&whole, 2);
    let expected = whole.greedy(&prompts[1], 20);
    let (replica, _workers) = start(&slices, &[&[0], &[1]], shape).await;
    let mut endless = greedy(&prompts[0], 10_000);
    endless.ignore_eos = true;
    let (endless, other) = tokio::join!(
        async { replica.start(endless).await.unwrap().rest().await.unwrap() },
        replica.generate(&prompts[1], 20)
    );
    assert_eq!(endless.finished.unwrap().reason(), v1::FinishReason::Length);
    assert_eq!(endless.tokens.len(), 64 - prompts[0].len() + 1);
    assert_eq!(other.unwrap().tokens, expected);
}

/// Field cases 1 and 6.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_stage_fails_its_requests_and_a_new_one_takes_its_place() {
    let slices = Slices::cut(&[10, 20]);
    let stages: &[&[usize]] = &[&[0], &[1], &[2]];
    let mut whole = Whole::load(&slices, SHAPE.n_ctx);
    let prompt = prompts(&whole, 1).remove(0);
    let expected = whole.greedy(&prompt, 12);
    let ca = ClusterCa::new().unwrap();
    let configs = configs(&slices, stages, SHAPE, &ca);
    let mut workers = Vec::new();
    for config in &configs {
        workers.push(Worker::start(config.clone()).await.unwrap());
    }
    let mut replica = Replica::link(workers.iter().map(Worker::address).collect(), &ca, SHAPE).await;
    for (lost, config) in configs.iter().enumerate() {
        let mut request = greedy(&prompt, 200);
        request.ignore_eos = true;
        let mut running = replica.start(request).await.unwrap();
        running.until_tokens(3).await;
        let left = workers.remove(lost);
        let since = Instant::now();
        left.stop().await.unwrap();
        if lost < 2 {
            let answer = running.rest().await.unwrap();
            assert!(since.elapsed() < Duration::from_secs(5), "noticed after {:?}", since.elapsed());
            assert_eq!(answer.failed.unwrap().kind(), v1::FailureKind::ReplicaLost);
            let refused = replica.generate(&prompt, 1).await.unwrap_err();
            assert_eq!(refused.code(), Code::Unavailable, "{refused}");
        } else {
            // The master itself. Its connections outlive it in this process, so it can even say so.
            let failed = running.rest().await.unwrap().failed.unwrap();
            assert!(failed.message.contains("stage 2 was stopped"), "{failed:?}");
        }
        let witness = (lost + 2) % 3;
        let status = replica.wait_for(witness, |status| !status.link_failure.is_empty()).await;
        assert!(status.link_failure.contains("stage"), "{}", status.link_failure);

        let worker = Worker::start(config.clone()).await.unwrap();
        replica.addresses[lost] = worker.address();
        workers.insert(lost, worker);
        replica.wait_for(lost, |status| status.state() == v1::LoadState::Loaded).await;
        replica.relink().await.unwrap();
        let answer = replica.generate(&prompt, 12).await.unwrap();
        assert_eq!(answer.tokens, expected, "after the loss of stage {lost}");
        for stage in 0..3 {
            assert_eq!(replica.status(stage).await.link_failure, "");
        }
    }
}

/// Field case 6.
#[tokio::test(flavor = "multi_thread")]
async fn epochs_only_rise_and_each_has_one_stream() {
    let slices = Slices::cut(&[15]);
    let (mut replica, _workers) = start(&slices, &[&[0], &[1]], SHAPE).await;
    let mut stage = replica.stage(1).await;
    let forward = |epoch: Option<&str>| {
        let mut request = Request::new(tokio_stream::iter([v1::Frame::default()]));
        if let Some(epoch) = epoch {
            request.metadata_mut().insert("shoal-epoch", epoch.parse().unwrap());
        }
        request
    };
    for (epoch, code) in [
        (None, Code::InvalidArgument),
        (Some("x"), Code::InvalidArgument),
        (Some("0"), Code::FailedPrecondition),
        (Some("2"), Code::FailedPrecondition),
        (Some("1"), Code::AlreadyExists),
    ] {
        let refused = stage.forward(forward(epoch)).await.unwrap_err();
        assert_eq!(refused.code(), code, "{epoch:?}: {refused}");
    }
    let link =
        |epoch, next: &str| v1::LinkRequest { epoch, next: next.to_owned(), encoding: 1, chain: Vec::new() };
    let next = replica.addresses[0].to_string();
    for (request, code) in [
        (link(1, &next), Code::FailedPrecondition),
        (link(0, &next), Code::FailedPrecondition),
        (link(9, ""), Code::InvalidArgument),
        (v1::LinkRequest { encoding: 7, ..link(9, &next) }, Code::InvalidArgument),
    ] {
        assert_eq!(stage.link(request).await.unwrap_err().code(), code);
    }
    // None of this has disturbed the replica.
    assert_eq!(replica.generate(&[1, 2, 3], 3).await.unwrap().tokens.len(), 3);
    replica.relink().await.unwrap();
    assert_eq!(replica.generate(&[1, 2, 3], 3).await.unwrap().tokens.len(), 3);
    // A frame out of limits breaks the chain of its epoch, in words.
    replica.epoch += 1;
    stage.link(link(replica.epoch, &next)).await.unwrap();
    let bad = v1::Frame { epoch: replica.epoch, entry_layer: 7, ..Default::default() };
    let mut request = Request::new(tokio_stream::iter([bad]));
    request.metadata_mut().insert("shoal-epoch", replica.epoch.into());
    let mut replies = stage.forward(request).await.unwrap().into_inner();
    let refused = replies.message().await.unwrap_err();
    // Either the refusal itself or the break that it is.
    assert!(
        refused.message().contains("frame enters at layer 7, but this stage begins at layer 15"),
        "{refused}"
    );
    assert!(replica.status(1).await.link_failure.contains("enters at layer 7"));
}

/// Field case 8.
#[tokio::test(flavor = "multi_thread")]
async fn garbage_on_a_stages_port_does_not_disturb_a_generation() {
    let slices = Slices::cut(&[15]);
    let mut whole = Whole::load(&slices, SHAPE.n_ctx);
    let prompt = prompts(&whole, 1).remove(0);
    let expected = whole.greedy(&prompt, 24);
    let (replica, _workers) = start(&slices, &[&[0], &[1]], SHAPE).await;
    let mut running = replica.start(greedy(&prompt, 24)).await.unwrap();
    running.until_tokens(1).await;
    for address in &replica.addresses {
        for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0x16, 3, 1, 0xff], &vec![0xA5; 1 << 20]] {
            let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
            let _ = stream.write_all(garbage).await;
            let _ =
                tokio::time::timeout(Duration::from_millis(50), stream.read_to_end(&mut Vec::new())).await;
        }
    }
    assert_eq!(running.rest().await.unwrap().tokens, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_does_not_load_is_told_by_status() {
    let slices = Slices::cut(&[15]);
    let ca = ClusterCa::new().unwrap();
    let mut config = configs(&slices, &[&[0], &[1]], SHAPE, &ca).remove(1);
    std::fs::write(&config.slices[0].path, b"GGUF, but not really").unwrap();
    let worker = Worker::start(config.clone()).await.unwrap();
    let replica = Replica::unlinked(vec![worker.address()], &ca, SHAPE);
    let deadline = Instant::now() + PATIENCE;
    let failure = loop {
        let status = replica.status(0).await;
        if status.state() == v1::LoadState::Failed {
            break status.failure;
        }
        assert!(Instant::now() < deadline, "still {status:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert!(failure.contains("cannot load the model") && failure.contains("15-30.gguf"), "{failure}");
    let link = v1::LinkRequest { epoch: 1, next: "127.0.0.1:1".to_owned(), encoding: 1, chain: Vec::new() };
    assert_eq!(replica.stage(0).await.link(link).await.unwrap_err().code(), Code::FailedPrecondition);
    assert_eq!(replica.generate(&[1], 1).await.unwrap_err().code(), Code::Unavailable);

    // Slices of another model, or of other blocks, are noticed too.
    config.slices[0].path = slices.slice(slices.ranges[0]);
    config.n_embd = 64;
    let worker = Worker::start(config).await.unwrap();
    let replica = Replica { addresses: vec![worker.address()], ..replica };
    let deadline = Instant::now() + PATIENCE;
    while replica.status(0).await.state() != v1::LoadState::Failed {
        assert!(Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(replica.status(0).await.failure.contains("width of a hidden row is 576"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stage_that_holds_other_blocks_than_it_was_told_fails_to_link_in_words() {
    let slices = Slices::cut(&[15]);
    let ca = ClusterCa::new().unwrap();
    let worker = Worker::start(configs(&slices, &[&[0], &[1]], SHAPE, &ca).remove(0)).await.unwrap();
    let replica = Replica {
        addresses: vec![worker.address()],
        identity: ca.issue("agent").unwrap(),
        epoch: 0,
        encoding: SHAPE.encoding,
        blocks: Vec::new(),
    };
    replica.wait_for(0, |status| status.state() == v1::LoadState::Loaded).await;
    // Nobody listens there; the agent gives up first.
    let mut stage = replica.stage(0).await;
    let mut request = Request::new(v1::LinkRequest {
        epoch: 1,
        next: "127.0.0.1:9".to_owned(),
        encoding: 1,
        chain: Vec::new(),
    });
    request.set_timeout(Duration::from_millis(300));
    assert!(stage.link(request).await.is_err());
    // The next epoch is joined all the same.
    let mut request = Request::new(v1::LinkRequest {
        epoch: 2,
        next: "127.0.0.1:9".to_owned(),
        encoding: 1,
        chain: Vec::new(),
    });
    request.set_timeout(Duration::from_millis(300));
    assert!(stage.link(request).await.is_err());
    assert_eq!(replica.status(0).await.epoch, 2);
}
