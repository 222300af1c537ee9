//! Flags that several commands share.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// Which model, on which device.
#[derive(Args, Clone, Debug)]
pub struct ModelArgs {
    /// Checkpoint directory. Default: the pulled model if it is there, else the small one inside the binary.
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Longest context in tokens. Default: what the free memory allows, at most what the model was trained for.
    #[arg(long, value_name = "TOKENS")]
    pub ctx: Option<usize>,
    #[command(flatten)]
    pub device: DeviceArgs,
}

impl ModelArgs {
    /// The same on another device.
    pub fn on(&self, backend: BackendName) -> ModelArgs {
        ModelArgs { device: DeviceArgs { backend, ..self.device.clone() }, ..self.clone() }
    }
}

/// Which device, and how it is used.
#[derive(Args, Clone, Debug)]
pub struct DeviceArgs {
    /// Device to run on.
    #[arg(long, value_enum, default_value_t = BackendName::Auto)]
    pub backend: BackendName,
    /// CPU threads. Default: one per physical core that this process may use.
    #[arg(long, value_name = "N", value_parser = parse_threads)]
    pub threads: Option<usize>,
    /// Element type of the KV cache.
    #[arg(long, value_enum, default_value_t = KvType::Bf16)]
    pub kv: KvType,
}

/// Devices by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendName {
    /// The fastest that is there.
    Auto,
    /// Threads of this machine's processor.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
    /// The GPU of a Mac. No Mac has run it yet, so `auto` does not choose it.
    Metal,
    /// The plain f32 specification: slow, for comparison.
    Reference,
}

impl BackendName {
    /// As `--backend` takes it.
    pub fn name(self) -> String {
        value_name(self)
    }
}

fn value_name(value: impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// Element types of the KV cache by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KvType {
    /// Exact.
    F32,
    /// Half the memory, rounded keys and values.
    Bf16,
}

impl KvType {
    /// As `--kv` takes it.
    pub fn name(self) -> String {
        value_name(self)
    }

    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            KvType::F32 => 4,
            KvType::Bf16 => 2,
        }
    }
}

/// How tokens are chosen. What is left out comes from the checkpoint's generation_config.json.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// 0 always takes the most likely token.
    #[arg(long, value_name = "T")]
    pub temperature: Option<f32>,
    /// Only the N most likely tokens; 0 is off.
    #[arg(long, value_name = "N")]
    pub top_k: Option<i64>,
    /// The most likely tokens that together reach this probability; 1 is off.
    #[arg(long, value_name = "P")]
    pub top_p: Option<f32>,
    /// Only tokens with at least this share of the highest probability; 0 is off.
    #[arg(long, value_name = "P")]
    pub min_p: Option<f32>,
    /// Lower the logits of tokens that were generated before; 0 is off.
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub presence_penalty: Option<f32>,
    /// Lower them by their count; 0 is off.
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub frequency_penalty: Option<f32>,
    /// Divide their logits; 1 is off.
    #[arg(long, value_name = "X")]
    pub repetition_penalty: Option<f32>,
    /// Add to the logit of a token, like 42=-5; may be given several times.
    #[arg(long, value_name = "ID=X", value_parser = parse_bias, allow_hyphen_values = true)]
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the draws. Default: a new one each time.
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Stop before this text; may be given several times.
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Most tokens to generate. Default: until the context is full.
    #[arg(short = 'n', long, value_name = "N")]
    pub max_tokens: Option<usize>,
}

fn parse_threads(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| "expected a number of threads, at least 1".to_owned())
}

fn parse_bias(text: &str) -> Result<(u32, f32), String> {
    let expected = || format!("{text:?} is not ID=NUMBER, like 42=-5");
    let (id, bias) = text.split_once('=').ok_or_else(expected)?;
    Ok((id.trim().parse().map_err(|_| expected())?, bias.trim().parse().map_err(|_| expected())?))
}
