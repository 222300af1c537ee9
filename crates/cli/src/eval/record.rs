//! What is kept of an evaluation: one JSON object on one line. `bench/results/README.md` describes the fields.

use lily_model::Checkpoint;
use serde::Serialize;

use super::Common;
use crate::bench::machine::{COMMIT, ENGINE, Machine};
use crate::bench::record::{Journal, Sizes, model_name, now};
use crate::devices;

/// One evaluation: on what, and its result under the evaluation's name.
#[derive(Serialize)]
struct Record<'a, R> {
    eval: &'static str,
    engine: &'static str,
    commit: Option<&'static str>,
    date: String,
    machine: Machine,
    device: &'a str,
    threads: usize,
    kv: String,
    model: String,
    shape: Sizes,
    result: &'a R,
}

/// The file of `--json`, opened before anything is computed in vain.
pub struct Results(Option<Journal>);

impl Results {
    pub fn open(common: &Common) -> anyhow::Result<Results> {
        Ok(Results(common.json.as_deref().map(Journal::open).transpose()?))
    }

    /// Appends the result of an evaluation on a device, if there is a file for it.
    pub fn append<R: Serialize>(
        &mut self,
        eval: &'static str,
        common: &Common,
        checkpoint: &Checkpoint,
        device: &str,
        result: &R,
    ) -> anyhow::Result<()> {
        let Some(journal) = &mut self.0 else { return Ok(()) };
        journal.append(&Record {
            eval,
            engine: ENGINE,
            commit: COMMIT,
            date: now(),
            machine: Machine::here(),
            device,
            threads: devices::threads(&common.model.device),
            kv: common.kv().name(),
            model: model_name(checkpoint),
            shape: Sizes::of(&checkpoint.config.shape),
            result,
        })
    }
}
