//! `lily run`: one prompt, one answer.

use std::io::{IsTerminal, Read};
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use lily_engine::{FinishReason, Prompt, TextModel};
use lily_model::chat::{Chat, Rendered};
use serde_json::{Value, json};

use crate::args::{ModelArgs, SamplingArgs};
use crate::exit::{Interrupted, Usage};
use crate::talk::Talk;

/// Arguments of `lily run`.
#[derive(Args)]
pub struct RunArgs {
    /// The prompt. Without it, or as `-`, it is read from stdin.
    prompt: Option<String>,
    /// A system message before the prompt.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Answer at once, without thinking first.
    #[arg(long)]
    no_think: bool,
    /// Tools that the model may call: a JSON file with a list in the format of OpenAI's API. Calls are printed as JSON, one
    /// per line, and not run; one that the end of the answer cut says so.
    #[arg(long, value_name = "FILE", conflicts_with = "raw")]
    tools: Option<PathBuf>,
    /// Continue the prompt as it stands: no chat template. Control tokens in it count.
    #[arg(long, conflicts_with_all = ["system", "no_think"])]
    raw: bool,
    /// No counts on stderr.
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
}

/// Runs the command.
pub fn run(args: RunArgs) -> anyhow::Result<()> {
    let text = match args.prompt.as_deref() {
        None | Some("-") => read_stdin()?,
        Some(prompt) => prompt.to_owned(),
    };
    if text.trim().is_empty() {
        return Err(Usage("the prompt is empty: give some text, or pipe it in".into()).into());
    }
    let tools = args.tools.as_ref().map(read_tools).transpose()?.unwrap_or(Value::Null);
    let mut talk = Talk::open(&args.model)?;
    let prompt = prompt(&args, &talk.text, text, tools.clone())?;
    let answer = talk.answer(&prompt, &args.sampling, &tools)?;
    if !args.quiet {
        eprintln!("\n{}", talk.stats(&answer.finished));
    }
    match answer.finished.reason {
        FinishReason::Cancelled => Err(Interrupted.into()),
        _ => Ok(()),
    }
}

fn prompt(args: &RunArgs, model: &TextModel, text: String, tools: Value) -> anyhow::Result<Prompt> {
    if args.raw {
        return Ok(model.prompt(&Rendered::by_hand(text))?);
    }
    let mut messages = Vec::new();
    if let Some(system) = &args.system {
        messages.push(json!({"role": "system", "content": system}));
    }
    messages.push(json!({"role": "user", "content": text}));
    let chat = Chat {
        messages: Value::Array(messages),
        tools,
        enable_thinking: args.no_think.then_some(false),
        add_generation_prompt: true,
        ..Chat::default()
    };
    Ok(model.prompt(&model.template.render_chat(&chat)?)?)
}

fn read_stdin() -> anyhow::Result<String> {
    if std::io::stdin().is_terminal() {
        eprintln!("lily: reading the prompt from the terminal; end it with Ctrl-D");
    }
    let mut bytes = Vec::new();
    std::io::stdin().read_to_end(&mut bytes).context("cannot read the prompt from stdin")?;
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Usage(format!(
            "the prompt on stdin is not UTF-8: byte {at} is invalid; convert it first, for example with iconv"
        ))
        .into()
    })
}

fn read_tools(file: &PathBuf) -> anyhow::Result<Value> {
    let json = std::fs::read(file).with_context(|| format!("cannot read tools from {}", file.display()))?;
    let tools = serde_json::from_slice(&json)
        .map_err(|e| Usage(format!("{} is not JSON: {e}; expected a list of tools", file.display())))?;
    Ok(tools)
}
