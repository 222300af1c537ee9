//! Errors to one line on stderr and an exit code. The only place that does it.

use std::process::ExitCode;

use lily_backend::Error as BackendError;
use lily_engine::{EngineError, TextError};
use lily_model::ModelError;
use lily_model::chat::ChatError;
use lily_model::tokenizer::TokenizerError;

/// The codes, as `--help` prints them.
pub const HELP: &str = "Exit codes: 0 done, 1 failed, 2 wrong arguments or request, 3 the checkpoint cannot be used, \
                        4 the device cannot run it, 130 interrupted";

/// The user stopped the work with Ctrl-C; what was produced until then has been shown.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub struct Interrupted;

/// Wrong input from the user, in words that say what to change.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Usage(pub String);

/// Prints the error, if there is one, and chooses the code.
pub fn report(result: anyhow::Result<()>) -> ExitCode {
    let Err(error) = result else {
        return ExitCode::SUCCESS;
    };
    if error.is::<Interrupted>() {
        return ExitCode::from(130);
    }
    // A reader that has seen enough (`lily run ... | head`) is no failure.
    if error.chain().any(is_broken_pipe) {
        return ExitCode::SUCCESS;
    }
    eprintln!("lily: {error:#}");
    ExitCode::from(error.chain().find_map(code).unwrap_or(1))
}

fn is_broken_pipe(cause: &(dyn std::error::Error + 'static)) -> bool {
    cause.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}

fn code(cause: &(dyn std::error::Error + 'static)) -> Option<u8> {
    if cause.is::<Usage>() || cause.is::<ChatError>() {
        return Some(2);
    }
    if cause.is::<ModelError>() || cause.is::<TokenizerError>() {
        return Some(3);
    }
    if let Some(error) = cause.downcast_ref::<TextError>() {
        return Some(if matches!(error, TextError::Chat(_)) { 2 } else { 3 });
    }
    if let Some(error) = cause.downcast_ref::<EngineError>() {
        return engine_code(error);
    }
    cause.downcast_ref::<BackendError>().map(backend_code)
}

fn backend_code(error: &BackendError) -> u8 {
    match error {
        BackendError::Unavailable { .. } | BackendError::OutOfMemory { .. } | BackendError::Device(_) => 4,
        _ => 1,
    }
}

fn engine_code(error: &EngineError) -> Option<u8> {
    match error {
        EngineError::Backend(error) => Some(backend_code(error)),
        _ => Some(2),
    }
}
