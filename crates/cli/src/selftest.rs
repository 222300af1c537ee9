//! `lily selftest`: whether the devices of this machine compute what they should, as a report that can be sent.
//!
//! Three kinds of checks, for each device: every kernel compiles, as far as a device compiles any by itself; the cases of
//! [`cases`] come to the outputs of the reference, which are recorded in the binary; the laws of the backend contract hold.

mod cases;

use std::panic::{self, AssertUnwindSafe};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context, bail};
use clap::Args;
use lily_backend::Backend;
use lily_backend::conformance::{LAWS, Subject};
use lily_metal::KernelReport;
use lily_model::{Checkpoint, Shape};

use crate::args::{BackendName, DeviceArgs, KvType, ModelArgs};
use crate::{checkpoint, devices};
use cases::{CASES, Case, Comparison, Recorded};

/// Arguments of `lily selftest`.
#[derive(Args)]
pub struct SelftestArgs {
    /// `auto` is every device that is there.
    #[command(flatten)]
    device: DeviceArgs,
    /// Computes the cases with the reference and writes what is recorded in the binary.
    #[arg(long, value_name = "FILE", hide = true)]
    record: Option<PathBuf>,
}

/// How far two ways through the model may part in the laws, where they choose the same experts, on the demo model: four times what was
/// measured on a CPU over prompts of 9 to 200 tokens: 2.1e-2 with keys and values in BF16, each of which may round to the other
/// neighbour, 2.7e-3 without. A token lost or seen twice moves logits by several units. How exact a device is, the cases say.
const fn law_budget(kv: KvType) -> f32 {
    match kv {
        KvType::Bf16 => 8e-2,
        KvType::F32 => 1e-2,
    }
}

/// Runs the command. An error if a check failed, or a device that was asked for by name is not there.
pub fn selftest(args: &SelftestArgs) -> anyhow::Result<()> {
    if let Some(file) = &args.record {
        return std::fs::write(file, cases::record()?).with_context(|| format!("cannot write {}", file.display()));
    }
    println!("lily {} on {} {}", env!("CARGO_PKG_VERSION"), std::env::consts::OS, std::env::consts::ARCH);
    println!("system   {}", devices::system());
    let (wanted, by_name) = match args.device.backend {
        BackendName::Auto => (devices::ALL.to_vec(), false),
        other => (vec![other], true),
    };
    let mut report = Report::default();
    for backend in wanted {
        let model = ModelArgs { model: None, ctx: Some(cases::CONTEXT), device: args.device.clone() }.on(backend);
        match devices::load(&model, Arc::new(checkpoint::demo()?)) {
            Ok(device) => println!("\ndevice   {}", device.caps().name),
            Err(reason) => {
                println!("\nfallback {} is not used: {reason:#}", backend.name());
                // Why a device that is there cannot be loaded is in its kernels.
                report.kernels(&model);
                if by_name {
                    return Err(reason);
                }
                continue;
            }
        }
        report.kernels(&model);
        report.cases(&model)?;
        report.laws(&model);
    }
    println!("\n{} checks, {} failed", report.checks, report.failures);
    match report.failures {
        0 => Ok(()),
        failures => bail!("{failures} of {} checks failed; please send this report as an issue", report.checks),
    }
}

#[derive(Default)]
struct Report {
    checks: usize,
    failures: usize,
}

impl Report {
    fn line(&mut self, kind: &str, name: &str, result: Result<String, String>) {
        self.checks += 1;
        match result {
            Ok(detail) => println!("{kind:<8} ok      {name}{detail}"),
            Err(detail) => {
                self.failures += 1;
                println!("{kind:<8} FAILED  {name}: {detail}");
            }
        }
    }

    /// Every kernel of the shapes at hand and of the full size.
    fn kernels(&mut self, model: &ModelArgs) {
        for (what, shape) in cases::shapes() {
            // That there is no such device was said already.
            let Ok(kernels) = devices::kernels(model.device.backend, &shape, model.device.kv) else { return };
            if kernels.is_empty() {
                return;
            }
            let count = kernels.len();
            for KernelReport { name, error, instead } in kernels {
                match (error, instead) {
                    (None, _) => {}
                    (Some(error), None) => self.line("kernel", &format!("{what} {name}"), Err(error)),
                    (Some(why), Some(instead)) => println!("fallback {what} {name}: {instead}, because {why}"),
                }
            }
            self.line("kernels", what, Ok(format!(", {count} asked for")));
        }
    }

    fn cases(&mut self, model: &ModelArgs) -> anyhow::Result<()> {
        let recorded = Recorded::open()?;
        let (budget, why) = devices::budget(model.device.backend, model.device.kv);
        println!("allowed  {budget:e} of the largest logit: {why}");
        for case in CASES {
            let started = Instant::now();
            let compared = compare(case, model, &recorded);
            let seconds = started.elapsed().as_secs_f64();
            let result = match compared {
                Ok(Comparison { worst, wrong_choice: None }) if worst <= budget => {
                    Ok(format!(", off by {worst:.1e}, {seconds:.1} s"))
                }
                Ok(Comparison { worst, wrong_choice: None }) => Err(format!("off by {worst:e}")),
                Ok(Comparison { wrong_choice: Some(what), worst }) => Err(format!("{what}, off by {worst:e}")),
                Err(error) => Err(format!("{error:#}")),
            };
            self.line("case", case.name, result);
        }
        Ok(())
    }

    fn laws(&mut self, model: &ModelArgs) {
        let loaded = || devices::load(model, Arc::new(checkpoint::demo()?));
        let load = || -> Box<dyn Backend> {
            match loaded() {
                Ok(device) => device,
                Err(error) => panic::panic_any(format!("the device could not be loaded again: {error:#}")),
            }
        };
        let budget = law_budget(model.device.kv);
        for (name, law) in LAWS {
            let subject = Subject { load: &load, budget, experts_per_token: Shape::DEMO.experts_per_token };
            let broken = panic_of(|| law(&subject));
            self.line("law", &name.replace('_', " "), broken.map_or(Ok(String::new()), Err));
        }
    }
}

/// Runs a case on a fresh device.
fn compare(case: &Case, model: &ModelArgs, recorded: &Recorded) -> anyhow::Result<Comparison> {
    let checkpoint: Checkpoint = case.checkpoint()?;
    let shape = checkpoint.config.shape.clone();
    let mut device = devices::load(model, Arc::new(checkpoint))?;
    let got = case.run(&mut *device, &shape)?;
    let (budget, _) = devices::budget(model.device.backend, model.device.kv);
    Comparison::new(&got, &recorded.logits(case.name)?, shape.vocab, budget)
}

/// The message of a panic, if `run` panics. It is not printed where it happens.
fn panic_of(run: impl FnOnce()) -> Option<String> {
    static PLACE: Mutex<String> = Mutex::new(String::new());
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|info| {
        let place = info.location().map(|place| format!(" ({}:{})", place.file(), place.line()));
        *PLACE.lock().unwrap_or_else(PoisonError::into_inner) = place.unwrap_or_default();
    }));
    let result = panic::catch_unwind(AssertUnwindSafe(run));
    panic::set_hook(hook);
    let cause = result.err()?;
    let text = cause.downcast_ref::<String>().cloned();
    let text = text.or_else(|| cause.downcast_ref::<&str>().map(|text| (*text).to_owned()));
    let place = PLACE.lock().unwrap_or_else(PoisonError::into_inner);
    Some(format!("{}{place}", text.unwrap_or_else(|| "a panic without words".into())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_law_is_a_message_with_its_place() {
        assert_eq!(panic_of(|| ()), None);
        let message = panic_of(|| panic!("{} is not {}", 1, 2)).unwrap();
        assert!(message.starts_with("1 is not 2 (") && message.contains("selftest.rs:"), "{message}");
    }

    #[test]
    fn what_failed_is_counted() {
        let mut report = Report::default();
        report.line("case", "a", Ok(String::new()));
        report.line("case", "b", Err("off".into()));
        assert_eq!((report.checks, report.failures), (2, 1));
    }
}
