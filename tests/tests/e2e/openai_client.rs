//! The Python `openai` client talks to Shoal as it would to OpenAI.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use tests::models::cache_folder;
use tests::server::Server;

/// A Python with the client installed, made once per machine under the cache folder.
fn python_with_openai() -> Result<PathBuf> {
    let venv = cache_folder()?.join("tools/openai-venv");
    let python = venv.join("bin/python");
    let run = |command: &mut Command| -> Result<()> {
        let output = command.output().with_context(|| format!("running {command:?}"))?;
        ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    };
    if !venv.join("installed").exists() {
        run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv))?;
        run(Command::new(&python).args(["-m", "pip", "install", "--quiet", "openai==3.57.0"]))?;
        std::fs::write(venv.join("installed"), "")?;
    }
    Ok(python)
}

#[tokio::test]
async fn the_python_client_streams_a_chat_a_tool_call_and_a_json_schema_answer() {
    let python = python_with_openai().unwrap();
    let server = Server::start("SmolLM2", &["--stages", "3", "--slots", "2", "--ctx", "1024"]).await.unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/e2e/openai_client.py");
    let output = tokio::task::spawn_blocking({
        let url = server.url("/v1");
        move || Command::new(python).arg(script).arg(url).output()
    })
    .await
    .unwrap()
    .unwrap();
    assert!(
        output.status.success(),
        "{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}
