//! A deployment under load while stages, hosts, links and masters fail at random moments: what fails when, how soon that is noticed,
//! how soon all is as before, and whether every client has the text of the whole model.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::chat::completion;
use crate::draws::{BEGINNINGS, Draws};
use crate::hand_off::{Question, expected};
use crate::lan::{Lan, LanBuilder};
use crate::models::{SMOLLM2, model_path};
use crate::process::signal;
use crate::reference::Reference;
use crate::server::Server;
use crate::site::{Replica, Site, on};

/// A frozen or unreachable stage is noticed within that.
pub const NOTICED: Duration = Duration::from_secs(3);

/// After the last fault all replicas serve again within that.
pub const FULL_AGAIN: Duration = Duration::from_secs(30);

/// A request that takes longer hangs: so many wait, and every fault costs some seconds.
const HANGS: Duration = Duration::from_secs(240);

/// For how long a link is cut.
const CUT: Duration = Duration::from_secs(5);

/// How often the replicas are looked at.
const LOOK: Duration = Duration::from_millis(40);

/// Hosts of a site: the orchestrator's, and two for each of two replicas.
const HOSTS: usize = 5;

/// What is asked, and what should come.
#[derive(Debug, Clone)]
pub struct Exam {
    questions: Vec<Question>,
    expected: Vec<String>,
}

impl Exam {
    /// So many different questions. Prompts and answers are so short that it makes no difference to llama.cpp beside whom they
    /// are computed.
    pub fn new(different: usize) -> Result<Self> {
        let question = |i: usize| Question {
            prompt: format!("({i}) {}", BEGINNINGS[i % BEGINNINGS.len()]),
            tokens: 12 + (i as u32 % 4) * 4,
        };
        let questions: Vec<Question> = (0..different).map(question).collect();
        let expected = expected(&mut Reference::load(&model_path(SMOLLM2)?)?, &questions)?;
        Ok(Self { questions, expected })
    }

    fn asked(&self, nth: usize) -> (&Question, &str) {
        let place = nth % self.questions.len();
        (&self.questions[place], &self.expected[place])
    }
}

/// What happens.
#[derive(Debug, Clone)]
pub struct Course {
    /// Of its moments and targets.
    pub seed: u64,
    /// Requests, all sent at once.
    pub requests: usize,
    /// In their order.
    pub faults: Vec<Fault>,
    /// Within which they come.
    pub within: Duration,
}

/// Something that fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A stage's process is killed.
    KilledStage,
    /// A master's is.
    KilledMaster,
    /// All processes of a host stop for some seconds, and go on.
    FrozenHost,
    /// Two hosts of a replica do not reach each other for five seconds.
    CutLink,
    /// A host and the orchestrator's do not.
    CutOff,
}

impl Fault {
    /// A killed stage, a killed master, a frozen host and a link that is cut, in an order of the seed's.
    pub fn all(seed: u64) -> Vec<Self> {
        let mut draws = Draws::new(seed);
        let cut = [Self::CutLink, Self::CutOff][draws.below(2)];
        let mut all = vec![Self::KilledStage, Self::KilledMaster, Self::FrozenHost, cut];
        draws.shuffle(&mut all);
        all
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::KilledStage => "stage killed",
            Self::KilledMaster => "master killed",
            Self::FrozenHost => "host frozen",
            Self::CutLink => "link cut",
            Self::CutOff => "cut off",
        })
    }
}

/// A fault that came.
#[derive(Debug, Clone)]
pub struct Struck {
    /// Which.
    pub fault: Fault,
    /// Whom.
    pub target: String,
    /// Since the requests were sent.
    pub at: Duration,
    /// For how long it lasted.
    pub lasted: Duration,
    /// Until a replica that served was seen not to, or to serve anew. None where none served that could be lost by it.
    pub noticed: Option<Duration>,
}

/// What came of a course.
#[derive(Debug)]
pub struct Report {
    /// Of the course.
    pub seed: u64,
    /// The faults.
    pub struck: Vec<Struck>,
    /// From the end of the last fault until all replicas served.
    pub full_again: Duration,
    /// Answers that are what the whole model says, token for token.
    pub exact: usize,
    /// What is wrong with the others.
    pub wrong: Vec<String>,
    /// Until the last answer.
    pub took: Duration,
    /// What all said, where something is not as promised.
    pub logs: Option<PathBuf>,
}

impl Report {
    /// What is not as promised.
    pub fn breaches(&self) -> Vec<String> {
        let late = self.struck.iter().filter(|struck| struck.noticed.is_some_and(|after| after > NOTICED));
        let mut breaches: Vec<String> =
            late.map(|struck| format!("{} ({}) was noticed too late", struck.fault, struck.target)).collect();
        if self.full_again > FULL_AGAIN {
            breaches.push(format!("full width after {:.1} s", self.full_again.as_secs_f64()));
        }
        breaches.extend(self.wrong.iter().cloned());
        breaches
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Struck { fault, target, at, lasted, noticed } in &self.struck {
            let seconds = |time: &Duration| format!("{:.2} s", time.as_secs_f64());
            let noticed = noticed.as_ref().map_or("-".to_owned(), seconds);
            let lasted = if lasted.is_zero() { String::new() } else { format!(" for {}", seconds(lasted)) };
            let what = format!("{fault}{lasted}");
            writeln!(f, "  {:>7}  {what:<24} {target:<16} noticed after {noticed}", seconds(at))?;
        }
        let (exact, lost) = (self.exact, self.wrong.len());
        let (full, took) = (self.full_again.as_secs_f64(), self.took.as_secs_f64());
        write!(
            f,
            "  exact {exact}, lost {lost}; last answer after {took:.1} s; full width {full:.1} s after the last fault"
        )?;
        self.logs.iter().try_for_each(|logs| write!(f, "\n  what all said is in {}", logs.display()))
    }
}

/// The Lan of a course.
pub fn hosts() -> LanBuilder {
    Lan::e2llm(HOSTS)
}

/// Runs a course on such a Lan.
pub fn run(course: &Course, exam: &Exam, lan: &Lan) -> Result<Report> {
    let boss = lan.hosts().first().context("no host")?;
    on(boss, async || {
        let queue = course.requests.to_string();
        let site = Site::start(lan, &["--queue", &queue]).await?;
        let trial = Trial { site: &site, sightings: RefCell::default(), began: Instant::now() };
        let mut report = trial.run(course, exam).await.with_context(|| site.logs())?;
        if !report.breaches().is_empty() {
            let file = std::env::temp_dir().join(format!("shoal-survival-{}.log", course.seed));
            std::fs::write(&file, site.logs())?;
            report.logs = Some(file);
        }
        Ok(report)
    })
}

/// What a replica was seen to do: the epoch in which it serves, or none.
type Sighting = (Instant, Option<u64>);

struct Trial<'a> {
    site: &'a Site<'a>,
    /// Changes, by replica.
    sightings: RefCell<BTreeMap<usize, Vec<Sighting>>>,
    began: Instant,
}

/// A fault that has come, and who should be seen to suffer from it.
struct Blow {
    fault: Fault,
    target: String,
    at: Instant,
    lasted: Duration,
    suffer: Vec<usize>,
}

impl Trial<'_> {
    async fn run(&self, course: &Course, exam: &Exam) -> Result<Report> {
        tokio::select! {
            report = self.survive(course, exam) => report,
            () = self.watch() => bail!("nobody watches any more"),
        }
    }

    async fn survive(&self, course: &Course, exam: &Exam) -> Result<Report> {
        let asking = async { (ask(&self.site.server, course.requests, exam).await, self.began.elapsed()) };
        let striking = async {
            let blows = self.strike(course).await?;
            Ok::<_, anyhow::Error>((blows, self.site.until_full(FULL_AGAIN * 3).await?))
        };
        let ((answers, took), struck) = tokio::join!(asking, striking);
        let (blows, full_again) = struck?;
        let wrong: Vec<String> =
            answers.into_iter().filter_map(Result::err).map(|error| format!("{error:#}")).collect();
        let exact = course.requests - wrong.len();
        let struck = blows.into_iter().map(|blow| self.struck(blow)).collect();
        Ok(Report { seed: course.seed, struck, full_again, exact, wrong, took, logs: None })
    }

    /// Looks at the replicas again and again.
    async fn watch(&self) {
        loop {
            if let Ok((_, ready)) = self.site.server.ready().await {
                self.see(&ready);
            }
            sleep(LOOK).await;
        }
    }

    fn see(&self, ready: &Value) {
        let mut sightings = self.sightings.borrow_mut();
        let mut seen = BTreeMap::new();
        for replica in ready["replicas"].as_array().into_iter().flatten() {
            let number = replica["replica"].as_u64().unwrap_or_default() as usize;
            let epoch = replica["epoch"].as_u64().filter(|_| replica["status"] == "ready");
            seen.insert(number, epoch);
        }
        // One that is not there any more serves no more.
        for number in sightings.keys() {
            seen.entry(*number).or_default();
        }
        for (number, epoch) in seen {
            let of_replica = sightings.entry(number).or_default();
            if of_replica.last().is_none_or(|(_, last)| *last != epoch) {
                of_replica.push((Instant::now(), epoch));
            }
        }
    }

    /// Lets all faults come at their moments.
    async fn strike(&self, course: &Course) -> Result<Vec<Blow>> {
        let mut draws = Draws::new(course.seed);
        let within = u64::try_from(course.within.as_millis())?;
        let mut moments: Vec<Duration> = course.faults.iter().map(|_| draws.millis(1000, within)).collect();
        moments.sort_unstable();
        let plans = course.faults.iter().zip(moments).map(|(fault, moment)| (*fault, moment, draws.fork()));
        let blows = plans.map(|(fault, moment, draws)| async move {
            sleep(moment).await;
            self.blow(fault, draws).await
        });
        futures::future::try_join_all(blows.collect::<Vec<_>>()).await
    }

    async fn blow(&self, fault: Fault, mut draws: Draws) -> Result<Blow> {
        let replica = loop {
            let all = self.site.replicas().await?;
            let serving: Vec<Replica> = all.into_iter().filter(|one| one.serves).collect();
            match draws.one_of(&serving) {
                Some(replica) => break replica.clone(),
                None => sleep(LOOK).await,
            }
        };
        let lan = self.site.lan();
        let place = match fault {
            Fault::KilledMaster => replica.hosts.len() - 1,
            _ => draws.below(replica.hosts.len()),
        };
        let host = replica.hosts.get(place).context("a replica without stages")?.as_str();
        let suffer = vec![replica.number];
        let mut at = Instant::now();
        let (mut target, mut lasted) = (host.to_owned(), Duration::ZERO);
        match fault {
            Fault::KilledStage | Fault::KilledMaster => {
                for pid in self.site.workers_of(host) {
                    // It may have ended in between.
                    let _ = signal(pid, "KILL");
                }
            }
            Fault::FrozenHost => {
                lasted = draws.millis(4000, 9000);
                lan.host(host).freeze()?;
                // It takes a moment to stop them all.
                at = Instant::now();
                sleep(lasted).await;
                lan.host(host).thaw()?;
            }
            Fault::CutLink | Fault::CutOff => {
                let others = replica.hosts.iter().map(String::as_str);
                let mut others = others.filter(|other| *other != host && fault == Fault::CutLink);
                // One that was mended may be on a single host.
                let other = others.next().unwrap_or_else(|| self.site.boss());
                (target, lasted) = (format!("{host} - {other}"), CUT);
                lan.cut_pair(host, other)?;
                sleep(CUT).await;
                lan.heal()?;
            }
        }
        Ok(Blow { fault, target, at, lasted, suffer })
    }

    fn struck(&self, blow: Blow) -> Struck {
        let Blow { fault, target, at, lasted, suffer } = blow;
        let noticed = suffer.iter().filter_map(|replica| self.noticed(*replica, at)).max();
        Struck { fault, target, at: at - self.began, lasted, noticed }
    }

    /// How long after a moment a replica that served then was seen not to, or to be linked anew.
    fn noticed(&self, replica: usize, at: Instant) -> Option<Duration> {
        let sightings = self.sightings.borrow();
        let of_replica = sightings.get(&replica)?;
        let before = of_replica.iter().rev().find(|(when, _)| *when <= at)?;
        before.1?;
        let change = of_replica.iter().find(|(when, _)| *when > at)?;
        Some(change.0 - at)
    }
}

/// Sends all requests at once, and compares every answer.
pub(crate) async fn ask(server: &Server, requests: usize, exam: &Exam) -> Vec<Result<()>> {
    let asked = (0..requests).map(|nth| async move {
        let (question, expected) = exam.asked(nth);
        let answer = completion(
            server,
            json!({
                "prompt": question.prompt, "temperature": 0, "max_tokens": question.tokens,
                "stream_options": { "include_usage": true },
            }),
        );
        let answer = tokio::time::timeout(HANGS, answer).await;
        let answer = answer.with_context(|| format!("request {nth} hangs"))?;
        let answer = answer.with_context(|| format!("request {nth}"))?;
        let (text, counted) = (answer.text, answer.usage["completion_tokens"].as_u64());
        ensure!(text == expected, "request {nth}, {:?}: {text:?} is not {expected:?}", question.prompt);
        let whole = counted == Some(question.tokens.into()) || answer.finish_reason == "stop";
        ensure!(whole, "request {nth}: {counted:?} tokens of {}", question.tokens);
        Ok(())
    });
    futures::future::join_all(asked).await
}
