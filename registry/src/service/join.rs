//! The Join service: for hosts that are no members yet.

use protocol::certify::CheckedRequest;
use protocol::fingerprint::pairing_code;
use protocol::membership::{Admission, Newcomer};
use protocol::token::{TokenId, TokenSecret};
use protocol::v1;
use tonic::{Request, Response, Status};

use super::refusal::{Refusals, caller, internal};
use super::{Approval, Desk};
use crate::error::RegistryError;
use crate::event::EventKind;
use crate::registry::Registry;
use crate::store::{Asking, TokenRefusal, Verdict};
use crate::timestamp::Timestamp;

/// For those who are no members.
pub(super) struct JoinService {
    desk: Desk,
    refusals: Refusals,
}

/// What comes of an attempt.
enum Outcome {
    Admitted(Admission),
    Pending(String),
    Refused(Status),
}

impl JoinService {
    pub(super) fn new(desk: Desk) -> Self {
        let refusals = Refusals::new(desk.registry.clone());
        Self { desk, refusals }
    }

    /// Decides on a thread that may wait for the disk.
    async fn decide(
        &self,
        newcomer: Newcomer,
        decide: impl FnOnce(&Registry, &Desk, &Newcomer) -> Result<Outcome, RegistryError> + Send + 'static,
    ) -> Result<Outcome, Status> {
        let desk = self.desk.clone();
        let decided = self.desk.registry.run(move |registry| decide(registry, &desk, &newcomer));
        decided.await.map_err(|error| internal(&error))
    }
}

fn check(newcomer: Option<v1::Newcomer>) -> Result<Newcomer, Status> {
    Newcomer::check(newcomer).map_err(|error| Status::invalid_argument(error.to_string()))
}

/// Of a host whose word has been found good so far: the same build, a key of its own, and the rules of admission.
fn admit(
    registry: &Registry,
    desk: &Desk,
    newcomer: &Newcomer,
    token: Option<TokenId>,
) -> Result<Outcome, RegistryError> {
    if let Err(mismatch) = desk.build.check_same(&newcomer.build) {
        return Ok(Outcome::Refused(Status::failed_precondition(mismatch.to_string())));
    }
    let request = match CheckedRequest::check(&newcomer.certificate_request) {
        Ok(request) => request,
        Err(error) => return Ok(Outcome::Refused(Status::invalid_argument(error.to_string()))),
    };
    let key = request.fingerprint();
    let code = pairing_code(&key, &registry.fingerprint());
    let asking = match (token, desk.approval) {
        (Some(token), _) => Asking::WithToken(token),
        (None, Approval::Automatic) => Asking::Freely,
        (None, Approval::ByHand) => Asking::WithCode(&code),
    };
    Ok(match registry.store().ask(newcomer, &key, asking, Timestamp::now())? {
        Verdict::Admitted(name) => Outcome::Admitted(desk.certify(
            registry,
            (&newcomer.id, &name),
            request,
            EventKind::NodeJoined,
        )?),
        Verdict::Pending => Outcome::Pending(code),
        Verdict::Refused(reason) => Outcome::Refused(Status::permission_denied(reason)),
    })
}

#[tonic::async_trait]
impl v1::join_server::Join for JoinService {
    async fn join(&self, request: Request<v1::JoinRequest>) -> Result<Response<v1::Admission>, Status> {
        let caller = caller(&request);
        self.refusals.may_try(caller.ip())?;
        let v1::JoinRequest { newcomer, token_id, secret } = request.into_inner();
        let newcomer = check(newcomer)?;
        let who = newcomer.name.0.clone();
        // Lengths are no secret.
        let token = (token_id[..].try_into(), secret[..].try_into());
        let outcome = self.decide(newcomer, move |registry, desk, newcomer| {
            let (Ok(id), Ok(secret)) = token else { return Ok(refused(TokenRefusal::Wrong)) };
            let (id, secret) = (TokenId(id), TokenSecret(secret));
            match registry.store().check_token(id, &secret, Timestamp::now())? {
                Ok(()) => admit(registry, desk, newcomer, Some(id)),
                Err(refusal) => Ok(refused(refusal)),
            }
        });
        match outcome.await? {
            Outcome::Admitted(admission) => {
                tracing::info!(node = %admission.name, host = %caller.ip(), "a node joined");
                Ok(Response::new(admission.into()))
            }
            Outcome::Refused(status) => Err(self.refusals.refuse(caller, &who, status).await),
            Outcome::Pending(_) => Err(Status::internal("a token leaves nothing to decide")),
        }
    }

    async fn ask(&self, request: Request<v1::AskRequest>) -> Result<Response<v1::AskReply>, Status> {
        let caller = caller(&request);
        self.refusals.may_try(caller.ip())?;
        let newcomer = check(request.into_inner().newcomer)?;
        let who = newcomer.name.0.clone();
        let outcome = self.decide(newcomer, |registry, desk, newcomer| admit(registry, desk, newcomer, None));
        let reply = match outcome.await? {
            Outcome::Admitted(admission) => {
                tracing::info!(node = %admission.name, host = %caller.ip(), "a node joined");
                v1::ask_reply::Reply::Admission(admission.into())
            }
            Outcome::Pending(code) => v1::ask_reply::Reply::Pending(v1::Pending { code }),
            Outcome::Refused(status) => return Err(self.refusals.refuse(caller, &who, status).await),
        };
        Ok(Response::new(v1::AskReply { reply: Some(reply) }))
    }
}

fn refused(refusal: TokenRefusal) -> Outcome {
    Outcome::Refused(Status::permission_denied(refusal.to_string()))
}
