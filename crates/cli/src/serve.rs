//! `lily serve`: the model behind HTTP.

use std::net::IpAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use lily_backend::{Backend, Caps};
use lily_engine::{Engine, EngineOptions, SessionOptions, StoreOptions, TextModel};
use lily_model::Checkpoint;
use lily_server::replicas::Replicas;
use lily_server::script::{Script, ScriptBackend};
use lily_server::service::ServiceSettings;
use lily_server::turns::Turns;
use lily_server::{Hosts, Origins, Settings, life, page};
use tokio::net::TcpListener;

use crate::args::ModelArgs;
use crate::exit::Usage;
use crate::output::{bytes, grouped};
use crate::{checkpoint, devices};

/// Requests in progress on a device that shares the reading of weights among them, and on one that does not: there they only
/// share its time.
const RUNNING: [usize; 2] = [16, 4];
/// Tokens of a prompt in one step, likewise. Others wait for their next token as long as that takes: a GPU of the fastest kind needs
/// 0.1 s for the first, and the full-size model on two cores 4 s for the second.
const CHUNK: [usize; 2] = [2048, 256];
/// Room of a new session beyond its prompt, in tokens, before it has to move: 80 MB on Qwen3.6-35B-A3B.
const ROOM: usize = 4096;
/// Most sessions in memory, if their bytes do not limit them before.
const SESSIONS: usize = 64;

/// Arguments of `lily serve`.
#[derive(Args)]
pub struct ServeArgs {
    /// Address to listen on; 0.0.0.0 for all.
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port to listen on; 0 for any.
    #[arg(long, default_value_t = 8080)]
    port: u16,
    /// Key that requests must carry, as `Authorization: Bearer KEY` or `x-api-key: KEY`.
    #[arg(long, value_name = "KEY", env = "LILY_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// Web pages from here may call the server, like `https://example.org`, or `*`; may be given several times. Default: pages of this
    /// machine.
    #[arg(long, value_name = "ORIGIN")]
    cors: Vec<String>,
    /// Name by which the server may be called, beside its addresses and localhost, like `lily.example.org`, or `*`; may be given several
    /// times. Default: any where it listens on more than this machine, else none.
    #[arg(long, value_name = "NAME")]
    allow_host: Vec<String>,
    /// Name of the model for clients. Default: name of its directory.
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Most requests in progress at once. Default: 16 on a GPU, 4 on a CPU.
    #[arg(long, value_name = "N")]
    parallel: Option<usize>,
    /// Most requests that wait for their turn; more are told to come again.
    #[arg(long, value_name = "N", default_value_t = 64)]
    queue: usize,
    /// Most tokens of a prompt per step, after which others have theirs. Default: 2048 on a GPU, 256 on a CPU.
    #[arg(long, value_name = "TOKENS")]
    prefill_chunk: Option<usize>,
    /// Memory for conversations, those in progress and those kept for their next turn, like 8GB. Default: half of what is free on a CPU,
    /// all that is left on a GPU.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    cache_memory: Option<usize>,
    /// Directory for conversations that have no place in memory; they survive a restart.
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,
    /// Most bytes in it.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "20GB")]
    cache_disk: usize,
    /// Longest time of a request in seconds, waiting included. Default: no limit.
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u64>,
    /// Seconds that requests have to end when the server is stopped.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    grace: u64,
    /// Longest body of a request.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "32MB")]
    body_limit: usize,
    /// Write a record of each request here: ids of its prompt, settings, ids and text of its answer.
    #[arg(long, value_name = "DIR")]
    trace_dir: Option<PathBuf>,
    /// Keep the thinking of earlier turns in prompts, unless a request says otherwise.
    #[arg(long)]
    preserve_thinking: bool,
    /// Replay outputs from this file instead of running a model; see docs/server.md.
    #[arg(long, value_name = "FILE", conflicts_with = "model")]
    script: Option<PathBuf>,
    /// GPUs to put the model on, each for itself; a conversation stays on the one that has it cached.
    #[arg(long, value_name = "N", default_value = "1")]
    replicas: NonZeroUsize,
    #[command(flatten)]
    model: ModelArgs,
}

/// Runs the command until it is told to stop.
pub fn serve(args: &ServeArgs) -> anyhow::Result<()> {
    // Before the model is loaded, which may take long.
    let listener = std::net::TcpListener::bind((args.host, args.port)).with_context(|| {
        format!("cannot listen on {}:{}: is another server running there? --port chooses another", args.host, args.port)
    })?;
    listener.set_nonblocking(true)?;
    let origins = origins(&args.cors)?;
    if let Some(folder) = &args.trace_dir {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let Model { checkpoint, backends, name } = load(args)?;
    let text = Arc::new(TextModel::load(&checkpoint.source, &checkpoint.config)?);
    let (mut engines, mut device) = (Vec::new(), String::new());
    for (replica, backend) in backends.into_iter().enumerate() {
        let options = options(args, backend.as_ref(), &checkpoint, replica)?;
        if replica == 0 {
            device = described(backend.caps(), options.sessions.memory);
        }
        let folder = args.cache_dir.as_deref().unwrap_or(".".as_ref()).display();
        let engine = Engine::with_options(backend, Arc::clone(&text), options);
        engines.push(engine.with_context(|| format!("cannot use {folder}"))?);
    }
    let settings = ServiceSettings {
        model: args.name.clone().unwrap_or(name),
        turn_limit: args.timeout.map(Duration::from_secs),
        trace_dir: args.trace_dir.clone(),
        ..ServiceSettings::default()
    };
    let turns: Arc<dyn Turns> = Arc::new(Replicas::start(engines, &settings)?);
    let settings = Settings {
        api_key: args.api_key.clone(),
        body_limit_bytes: args.body_limit,
        origins,
        hosts: hosts(&args.allow_host, args.host),
        preserve_thinking: args.preserve_thinking.then_some(true),
        ..Settings::default()
    };
    let router = lily_server::router(Arc::clone(&turns), settings, page::routes());
    eprintln!("lily: {device}");
    eprintln!(
        "lily: http://{} is ready: a page to chat, OpenAI's API at /v1, Anthropic's at /v1/messages; Ctrl-C stops it",
        listener.local_addr()?
    );
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(async {
        let listener = TcpListener::from_std(listener)?;
        Ok(life::serve(turns, router, listener, Duration::from_secs(args.grace), told_to_stop()).await?)
    })
}

/// A device and what it has room for.
fn described(caps: &Caps, memory: Option<usize>) -> String {
    let memory = memory.map_or(String::new(), |most| format!(", {} for conversations", bytes(most)));
    format!("{}, context {} tokens{memory}", caps.name, grouped(caps.max_context))
}

/// What is served.
struct Model {
    checkpoint: Arc<Checkpoint>,
    /// One for each replica.
    backends: Vec<Box<dyn Backend>>,
    name: String,
}

fn load(args: &ServeArgs) -> anyhow::Result<Model> {
    let count = args.replicas.get();
    if let Some(file) = &args.script {
        let checkpoint = Arc::new(checkpoint::demo()?);
        let text = Arc::new(TextModel::load(&checkpoint.source, &checkpoint.config)?);
        let script = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        let wrong = |error| Usage(format!("{}: {error}", file.display()));
        let script = Script::parse(&script).map_err(wrong)?;
        let backend = || -> anyhow::Result<Box<dyn Backend>> {
            let caps = ScriptBackend::caps(&text);
            Ok(Box::new(ScriptBackend::new(script.clone(), Arc::clone(&text), caps).map_err(wrong)?))
        };
        let backends = std::iter::repeat_with(backend).take(count).collect::<anyhow::Result<_>>()?;
        return Ok(Model { checkpoint, backends, name: "script".into() });
    }
    let checkpoint = Arc::new(checkpoint::open(args.model.model.as_deref())?);
    let backends = devices::load_replicas(&args.model, &checkpoint, count)?;
    let name = checkpoint::name(&checkpoint);
    Ok(Model { checkpoint, backends, name })
}

fn options(
    args: &ServeArgs,
    backend: &dyn Backend,
    checkpoint: &Checkpoint,
    replica: usize,
) -> anyhow::Result<EngineOptions> {
    let Caps { overlaps, max_rows, max_context, bytes_per_token, bytes_per_state, .. } = *backend.caps();
    let by_device = |values: [usize; 2]| if overlaps { values[0] } else { values[1] };
    let running = args.parallel.unwrap_or_else(|| by_device(RUNNING).min(max_rows));
    if running == 0 {
        return Err(Usage("--parallel 0: expected at least 1".into()).into());
    }
    let memory = args.cache_memory.or_else(|| devices::session_memory(backend, checkpoint));
    let longest = bytes_per_state + max_context * bytes_per_token;
    if let (Some(ctx), Some(memory)) = (args.model.ctx, memory)
        && longest > memory
    {
        return Err(Usage(format!(
            "--ctx {ctx}: a conversation of so many tokens takes {}, and there are {} for all conversations; ask for a shorter \
             context, or for more memory with --cache-memory",
            bytes(longest),
            bytes(memory)
        ))
        .into());
    }
    // Another checkpoint's sessions are of no use, and are left alone.
    let fingerprint = lily_backend::export::fingerprint(checkpoint, "");
    let store = args.cache_dir.as_ref().map(|folder| StoreOptions {
        folder: folder.join(format!("{fingerprint:016x}-{replica}")),
        bytes: args.cache_disk as u64 / args.replicas.get() as u64,
    });
    Ok(EngineOptions {
        running,
        waiting: args.queue.max(1),
        chunk: Some(args.prefill_chunk.unwrap_or_else(|| by_device(CHUNK))),
        sessions: SessionOptions { most: SESSIONS.max(running), memory, room: Some(ROOM), store },
        ..EngineOptions::single()
    })
}

fn origins(listed: &[String]) -> anyhow::Result<Origins> {
    if let Some(wrong) = listed.iter().find(|origin| *origin != "*" && !origin.contains("://")) {
        return Err(Usage(format!("--cors {wrong}: expected an origin like https://example.org, or *")).into());
    }
    Ok(match listed {
        [] => Origins::Local,
        list if list.iter().any(|origin| origin == "*") => Origins::Any,
        list => Origins::Listed(list.to_vec()),
    })
}

/// A server that other machines can reach has names that it does not know.
fn hosts(listed: &[String], address: IpAddr) -> Hosts {
    let any = if listed.is_empty() { !address.is_loopback() } else { listed.iter().any(|name| name == "*") };
    if any { Hosts::Any } else { Hosts::Local(listed.to_vec()) }
}

/// Comes with Ctrl-C or the signal that service managers send. A second Ctrl-C ends at once.
async fn told_to_stop() {
    let interrupt = tokio::signal::ctrl_c();
    #[cfg(unix)]
    let terminate = async {
        match tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) {
            Ok(mut signal) => {
                signal.recv().await;
            }
            Err(error) => {
                tracing::warn!(%error, "the signal to terminate cannot be waited for");
                std::future::pending().await
            }
        }
    };
    #[cfg(not(unix))]
    let terminate = std::future::pending();
    tokio::select! {
        _ = interrupt => {}
        () = terminate => {}
    }
    eprintln!("lily: finishing what is in progress; Ctrl-C again ends at once");
    tokio::spawn(async {
        if tokio::signal::ctrl_c().await.is_ok() {
            std::process::exit(130);
        }
    });
}

/// A number of bytes with a unit, like 8GB or 512MiB.
fn parse_bytes(text: &str) -> Result<usize, String> {
    let expected = || format!("{text:?} is not a size like 8GB or 512MiB");
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..digits].parse().map_err(|_| expected())?;
    let unit = match text[digits..].trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "kb" | "k" => 1e3,
        "mb" | "m" => 1e6,
        "gb" | "g" => 1e9,
        "tb" | "t" => 1e12,
        "kib" => 1024.0,
        "mib" => 1024f64.powi(2),
        "gib" => 1024f64.powi(3),
        "tib" => 1024f64.powi(4),
        _ => return Err(expected()),
    };
    Ok((number * unit) as usize)
}

#[cfg(test)]
mod tests {
    use super::{Hosts, hosts, parse_bytes};

    #[test]
    fn only_a_server_that_others_reach_has_any_name() {
        let named = |names: &[&str]| Hosts::Local(names.iter().map(|name| (*name).to_owned()).collect());
        let of = |listed: &[&str], address: &str| {
            hosts(&listed.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>(), address.parse().unwrap())
        };
        assert_eq!([of(&[], "127.0.0.1"), of(&[], "::1")], [named(&[]), named(&[])]);
        assert_eq!([of(&[], "0.0.0.0"), of(&["*"], "127.0.0.1")], [Hosts::Any, Hosts::Any]);
        assert_eq!([of(&["a.b"], "127.0.0.1"), of(&["a.b"], "0.0.0.0")], [named(&["a.b"]), named(&["a.b"])]);
    }

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [("8GB", 8_000_000_000), ("1.5 gib", 1_610_612_736), ("512", 512), ("2k", 2000)] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "GB", "8 XB", "-1GB", "1..2GB"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }
}
