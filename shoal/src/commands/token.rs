//! `shoal token`: invitations to the cluster, made on the orchestrator's host, whether it runs or not.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use comfy_table::{Table, presets};
use protocol::finding::addresses;
use protocol::node::Address;
use protocol::token::JoinToken;
use registry::{Registry, Timestamp, TokenRecord};
use serde::Serialize;

use super::nodes::{CLUSTER_PORT, cluster_address};
use super::state;
use crate::cli::Globals;
use crate::output;

/// What can be done with tokens.
#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Make a token with which hosts join the cluster. It is shown once.
    Create(CreateArgs),
    /// List the tokens that were made.
    List(ListArgs),
    /// Let a token admit nobody any more. Nodes that joined with it stay.
    Revoke(RevokeArgs),
}

/// Arguments of `shoal token create`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal token create                             good for 24 hours, for any number of hosts
  shoal token create --ttl 30min
  shoal token create --address 192.168.1.5       where this host is reached, if it does not know that itself
  shoal node --join \"$(shoal token create)\"      on this very host

Whoever has the token can add hosts to the cluster until it expires or is revoked.")]
pub(crate) struct CreateArgs {
    /// For how long it is good.
    #[arg(long, env = "SHOAL_TOKEN_TTL", value_name = "TIME", default_value = "24h", value_parser = humantime::parse_duration)]
    ttl: Duration,
    /// Address of the orchestrator's cluster port; may be repeated [default: as `shoal serve` last listened].
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',', value_parser = cluster_address)]
    address: Vec<Address>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Arguments of `shoal token list`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal token list
  shoal token list --json")]
pub(crate) struct ListArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Arguments of `shoal token revoke`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal token revoke 0a1b2c3d4e5f       an id from `shoal token list`")]
pub(crate) struct RevokeArgs {
    /// The token's id.
    id: String,
}

#[derive(Serialize)]
struct Created {
    token: String,
    id: String,
    expires: Timestamp,
    ca: String,
    addresses: Vec<String>,
}

#[derive(Serialize)]
struct Entry {
    id: String,
    state: &'static str,
    made: Timestamp,
    expires: Timestamp,
    #[serde(skip_serializing_if = "Option::is_none")]
    revoked: Option<Timestamp>,
    uses: u32,
}

/// Runs a command.
pub(crate) fn run(command: TokenCommand, globals: &Globals) -> Result<()> {
    let folder = state::folder(globals)?.cluster();
    let opening = "opening the cluster's state";
    match command {
        TokenCommand::Create(args) => create(args, &Registry::open(&folder).context(opening)?),
        TokenCommand::List(args) => list(&args, &Registry::open_existing(&folder).context(opening)?),
        TokenCommand::Revoke(RevokeArgs { id }) => {
            Registry::open_existing(&folder).context(opening)?.revoke_token(&id)?;
            output::note(&format!("token {id} is revoked"))?;
            Ok(())
        }
    }
}

fn create(args: CreateArgs, registry: &Registry) -> Result<()> {
    let CreateArgs { ttl, address, json } = args;
    if ttl < Duration::from_secs(1) {
        bail!("--ttl {}: a token is good for a second at least", humantime::format_duration(ttl));
    }
    let known = registry.addresses()?;
    let addresses = match (address.is_empty(), known.is_empty()) {
        (false, _) => address,
        (true, false) => known,
        (true, true) => addresses::offered(([0, 0, 0, 0], CLUSTER_PORT).into(), &[]),
    };
    if addresses.is_empty() {
        bail!("this host has no address: say with --address where the orchestrator is reached");
    }
    let token = registry.make_token(ttl, addresses)?;
    let expires = Timestamp(token.expires);
    if json {
        return Ok(output::print_json(&created(&token, expires))?);
    }
    output::print(&token.to_text())?;
    output::note(&format!(
        "token {} expires {}, at {expires}; on each host: shoal node --join TOKEN",
        token.id,
        expires.relative_to(Timestamp::now())
    ))?;
    Ok(())
}

fn created(token: &JoinToken, expires: Timestamp) -> Created {
    Created {
        token: token.to_text(),
        id: token.id.to_string(),
        expires,
        ca: token.ca.to_string(),
        addresses: token.addresses.iter().map(ToString::to_string).collect(),
    }
}

fn list(args: &ListArgs, registry: &Registry) -> Result<()> {
    let (tokens, now) = (registry.tokens()?, Timestamp::now());
    if args.json {
        output::print_json(&tokens.iter().map(|token| entry(token, now)).collect::<Vec<_>>())?;
    } else if tokens.is_empty() {
        output::print("no tokens: `shoal token create` makes one")?;
    } else {
        output::print(&table(&tokens, now))?;
    }
    Ok(())
}

fn state_of(token: &TokenRecord, now: Timestamp) -> &'static str {
    match token.revoked {
        Some(_) => "revoked",
        None if token.expires <= now => "expired",
        None => "good",
    }
}

fn entry(token: &TokenRecord, now: Timestamp) -> Entry {
    let TokenRecord { id, made, expires, revoked, uses } = *token;
    Entry { id: id.to_string(), state: state_of(token, now), made, expires, revoked, uses }
}

fn table(tokens: &[TokenRecord], now: Timestamp) -> String {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    table.set_header(["id", "state", "made", "expires", "joined with it"]);
    for token in tokens {
        table.add_row([
            token.id.to_string(),
            state_of(token, now).to_owned(),
            token.made.relative_to(now),
            token.expires.relative_to(now),
            token.uses.to_string(),
        ]);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use protocol::token::TokenId;

    use super::*;

    #[test]
    fn the_list_tells_good_tokens_from_others() {
        let now = Timestamp(1_800_000_000);
        let token = |expires: u64, revoked| TokenRecord {
            id: TokenId([1; 6]),
            made: Timestamp(now.0 - 7200),
            expires: Timestamp(expires),
            revoked,
            uses: 3,
        };
        let tokens = [token(now.0 + 7200, None), token(now.0, None), token(now.0 + 1, Some(now))];
        assert_eq!(tokens.each_ref().map(|token| state_of(token, now)), ["good", "expired", "revoked"]);
        let text = table(&tokens, now);
        for part in ["010101010101", "in 2 h", "2 h ago", "3"] {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
    }
}
