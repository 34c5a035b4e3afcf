//! What a node tells of a worker that it runs for somebody.

use std::num::NonZero;

use cluster::Bytes;

use super::{BadMessage, clean_text};
use crate::v1;

const WHAT: &str = "a worker's event";

/// News of a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkerNews {
    /// Its files are being made.
    Preparing {
        /// What is being done.
        work: String,
        /// So far.
        done: Bytes,
        /// In all.
        total: Bytes,
    },
    /// It listens, and begins to load.
    Listening {
        /// Its process id on its host.
        pid: u32,
        /// At all addresses at which its node listens.
        port: NonZero<u16>,
        /// CPU threads.
        threads: u32,
    },
    /// It is gone. The last news.
    Ended {
        /// How, for people.
        how: String,
    },
}

impl WorkerNews {
    /// Checks a received event.
    pub fn check(event: v1::WorkerEvent) -> Result<Self, BadMessage> {
        use v1::worker_event::Event;
        let missing = BadMessage::Missing { what: WHAT, field: "content" };
        Ok(match event.event.ok_or(missing)? {
            Event::Preparing(v1::WorkerPreparing { work, done, total }) => {
                Self::Preparing { work: clean_text(&work), done: Bytes(done), total: Bytes(total) }
            }
            Event::Listening(v1::WorkerListening { pid, port, threads }) => {
                let bad = BadMessage::Number {
                    what: WHAT,
                    field: "port",
                    got: f64::from(port),
                    wanted: "between 1 and 65535",
                };
                let port = u16::try_from(port).ok().and_then(NonZero::new).ok_or(bad)?;
                Self::Listening { pid, port, threads }
            }
            Event::Ended(v1::WorkerEnded { how }) => Self::Ended { how: clean_text(&how) },
        })
    }
}

impl From<WorkerNews> for v1::WorkerEvent {
    fn from(news: WorkerNews) -> Self {
        use v1::worker_event::Event;
        let event = match news {
            WorkerNews::Preparing { work, done, total } => {
                Event::Preparing(v1::WorkerPreparing { work, done: done.0, total: total.0 })
            }
            WorkerNews::Listening { pid, port, threads } => {
                Event::Listening(v1::WorkerListening { pid, port: port.get().into(), threads })
            }
            WorkerNews::Ended { how } => Event::Ended(v1::WorkerEnded { how: clean_text(&how) }),
        };
        Self { event: Some(event) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;

    use super::*;

    fn news() -> [WorkerNews; 3] {
        [
            WorkerNews::Preparing { work: "cutting".into(), done: Bytes(1), total: Bytes(2) },
            WorkerNews::Listening { pid: 7, port: NonZero::new(4711).unwrap(), threads: 2 },
            WorkerNews::Ended { how: "was ended by signal 9".into() },
        ]
    }

    #[test]
    fn news_survives_the_wire() {
        for news in news() {
            assert_eq!(WorkerNews::check(news.clone().into()).unwrap(), news);
        }
    }

    #[test]
    fn last_words_move_no_cursor_and_are_not_endless() {
        let how = format!("said \u{1b}[2J{}", "x".repeat(9000));
        let WorkerNews::Ended { how } = WorkerNews::check(WorkerNews::Ended { how }.into()).unwrap() else {
            panic!("other news");
        };
        assert!(how.starts_with("said  [2Jx") && how.len() == super::super::LONGEST_WORDS, "{how}");
    }

    #[test]
    fn a_port_that_is_none_is_refused() {
        for port in [0, 65_536] {
            let listening = v1::WorkerListening { pid: 1, port, threads: 1 };
            let event = v1::WorkerEvent { event: Some(v1::worker_event::Event::Listening(listening)) };
            assert!(WorkerNews::check(event).unwrap_err().to_string().contains("port"));
        }
        assert!(WorkerNews::check(v1::WorkerEvent { event: None }).is_err());
    }

    proptest! {
        #[test]
        fn garbled_news_never_panics(
            which in 0..3_usize,
            garble in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        ) {
            let mut bytes = v1::WorkerEvent::from(news()[which].clone()).encode_to_vec();
            for (at, byte) in garble {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            if let Ok(Ok(WorkerNews::Ended { how })) = v1::WorkerEvent::decode(&bytes[..]).map(WorkerNews::check) {
                prop_assert!(!how.chars().any(char::is_control));
            }
        }
    }
}
