//! The devices: the only file that names them.

use std::sync::Arc;

use anyhow::Context as _;
use lily_backend::{Backend, Input, Row, RowOutput, StageOutput, StateId, Step, Want};
use lily_cpu::{CpuBackend, KvDtype, LoadOptions};
use lily_cuda::CudaBackend;
use lily_model::{Checkpoint, Shape, Source};
use lily_reference::{Logits, Reference};

use crate::args::{BackendName, DeviceArgs, KvType, ModelArgs};
use crate::exit::Usage;
use crate::output::{bytes, grouped};

/// Loads the chosen backend with room for the chosen context.
pub fn load(args: &ModelArgs, checkpoint: Arc<Checkpoint>) -> anyhow::Result<Box<dyn Backend>> {
    match args.device.backend {
        BackendName::Auto => match load_cuda(args, Arc::clone(&checkpoint), 0) {
            Ok(backend) => Ok(backend),
            Err(reason) => {
                match reason.downcast_ref() {
                    Some(lily_backend::Error::Unavailable { .. }) => tracing::debug!("{reason:#}"),
                    // There is a GPU, and what stands against it can be changed.
                    _ => tracing::warn!("the GPU is not used: {reason:#}"),
                }
                load(&args.on(BackendName::Cpu), checkpoint)
            }
        },
        BackendName::Cuda => load_cuda(args, checkpoint, 0),
        BackendName::Cpu => {
            let max_context = context(args, &checkpoint)?;
            let options = LoadOptions {
                threads: args.device.threads,
                kv: kv_dtype(args.device.kv),
                max_context: Some(max_context),
                ..LoadOptions::default()
            };
            Ok(Box::new(CpuBackend::load(checkpoint, &options)?))
        }
        BackendName::Metal => {
            if args.ctx.is_some() {
                context(args, &checkpoint)?;
            }
            let options = lily_metal::LoadOptions {
                kv: metal_kv(args.device.kv),
                max_context: args.ctx,
                ..lily_metal::LoadOptions::default()
            };
            Ok(lily_metal::load(&checkpoint, &options)?)
        }
        BackendName::Reference => Err(Usage(
            "the reference only computes logits: use it with `lily logits`, `lily eval text` or `lily inspect --diff`"
                .into(),
        )
        .into()),
    }
}

/// Loads the chosen backend on each of several GPUs, if it has more than one.
pub fn load_replicas(
    args: &ModelArgs,
    checkpoint: &Arc<Checkpoint>,
    count: usize,
) -> anyhow::Result<Vec<Box<dyn Backend>>> {
    if count == 1 {
        return Ok(vec![load(args, Arc::clone(checkpoint))?]);
    }
    if !matches!(args.device.backend, BackendName::Auto | BackendName::Cuda) {
        return Err(Usage(format!("--replicas {count}: only NVIDIA GPUs can be several; leave it out")).into());
    }
    (0..count).map(|device| load_cuda(args, Arc::clone(checkpoint), device)).collect()
}

/// Loads the weights onto a GPU. Its cache is BF16, so one that is asked to be exact is none of its.
fn load_cuda(args: &ModelArgs, checkpoint: Arc<Checkpoint>, device: usize) -> anyhow::Result<Box<dyn Backend>> {
    if args.device.kv == KvType::F32 {
        return Err(Usage("--kv f32: the CUDA backend keeps keys and values in BF16; use --backend cpu".into()).into());
    }
    if args.ctx.is_some() {
        context(args, &checkpoint)?;
    }
    let options = lily_cuda::LoadOptions { device, max_context: args.ctx, ..lily_cuda::LoadOptions::default() };
    Ok(Box::new(CudaBackend::load(checkpoint, &options)?))
}

/// What a forward pass gives.
#[derive(Default)]
pub struct Outputs {
    /// `[tokens, vocab]`.
    pub logits: Vec<f32>,
    /// The stages, if they were asked for, in the order of the forward pass.
    pub trace: Vec<StageOutput>,
}

/// What is wanted of a forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// The state alone.
    Nothing,
    /// The logits of every token.
    Logits,
    /// They and the stages.
    Stages,
}

/// A device or the reference, with one state: tokens in, logits out.
pub struct Forward(Loaded);

enum Loaded {
    Device { backend: Box<dyn Backend>, state: Option<StateId> },
    Reference { checkpoint: Arc<Checkpoint>, state: lily_reference::State },
}

impl Forward {
    /// Loads the chosen one with room for `longest` tokens, or as many as `--ctx` says.
    pub fn load(args: &ModelArgs, checkpoint: Arc<Checkpoint>, longest: usize) -> anyhow::Result<Forward> {
        if args.device.backend == BackendName::Reference {
            let state = Reference::new(&checkpoint).new_state();
            return Ok(Forward(Loaded::Reference { checkpoint, state }));
        }
        let args = ModelArgs { ctx: Some(args.ctx.unwrap_or(longest)), ..args.clone() };
        Ok(Forward(Loaded::Device { backend: load(&args, checkpoint)?, state: None }))
    }

    /// The device in words.
    pub fn name(&self) -> &str {
        match &self.0 {
            Loaded::Device { backend, .. } => &backend.caps().name,
            Loaded::Reference { .. } => "reference",
        }
    }

    /// The same with the element type of its KV cache, where there is a choice.
    pub fn describe(&self, kv: KvType) -> String {
        match &self.0 {
            Loaded::Device { backend, .. } => format!("{}, KV cache in {}", backend.caps().name, kv.name()),
            Loaded::Reference { .. } => self.name().into(),
        }
    }

    /// Most tokens that can be fed at once.
    pub fn max_chunk(&self) -> usize {
        match &self.0 {
            Loaded::Device { backend, .. } => backend.caps().max_chunk,
            Loaded::Reference { .. } => usize::MAX,
        }
    }

    /// Begins anew with room for so many tokens.
    pub fn start(&mut self, tokens: usize) -> anyhow::Result<()> {
        match &mut self.0 {
            Loaded::Device { backend, state } => {
                let most = backend.caps().max_context;
                if tokens > most {
                    return Err(Usage(format!("{tokens} token ids do not fit into a context of {most}")).into());
                }
                if let Some(state) = state.take() {
                    backend.free_state(state)?;
                }
                *state = Some(backend.new_state(tokens)?);
            }
            Loaded::Reference { checkpoint, state } => *state = Reference::new(checkpoint).new_state(),
        }
        Ok(())
    }

    /// Feeds tokens, at most [`Forward::max_chunk`].
    pub fn feed(&mut self, ids: &[u32], wanted: Wanted) -> anyhow::Result<Outputs> {
        match &mut self.0 {
            Loaded::Device { backend, state } => {
                let state = state.context("no state was started")?;
                let want = if wanted == Wanted::Nothing { Want::Nothing } else { Want::AllLogits };
                let row = Row { state, input: Input::Tokens(ids.to_vec()), want };
                let ticket = backend.submit(Step { rows: vec![row], trace: wanted == Wanted::Stages })?;
                let output = backend.wait(ticket)?;
                let logits = match output.rows.into_iter().next() {
                    Some(RowOutput::Logits(logits)) => logits,
                    _ => Vec::new(),
                };
                Ok(Outputs { logits, trace: output.trace })
            }
            Loaded::Reference { checkpoint, state } => {
                let reference = Reference::new(checkpoint);
                let logits = |state, want| reference.forward(state, ids, want);
                Ok(match wanted {
                    Wanted::Nothing => Outputs { logits: logits(state, Logits::Nothing), ..Outputs::default() },
                    Wanted::Logits => Outputs { logits: logits(state, Logits::All), ..Outputs::default() },
                    Wanted::Stages => {
                        let (logits, trace) = reference.traced(state, ids);
                        Outputs { logits, trace: trace.stages }
                    }
                })
            }
        }
    }
}

/// One forward pass over `ids` from an empty state.
pub fn forward(args: &ModelArgs, checkpoint: Checkpoint, ids: &[u32], trace: bool) -> anyhow::Result<Outputs> {
    let mut forward = Forward::load(args, Arc::new(checkpoint), ids.len())?;
    forward.start(ids.len())?;
    let mut all = Outputs::default();
    for chunk in ids.chunks(forward.max_chunk()) {
        let outputs = forward.feed(chunk, if trace { Wanted::Stages } else { Wanted::Logits })?;
        all.logits.extend(outputs.logits);
        merge_trace(&mut all.trace, outputs.trace);
    }
    Ok(all)
}

/// Appends the stages of a later chunk to those of the earlier ones.
fn merge_trace(all: &mut Vec<StageOutput>, chunk: Vec<StageOutput>) {
    for stage in chunk {
        match all.iter_mut().find(|s| s.stage == stage.stage) {
            Some(earlier) => earlier.values.extend(stage.values),
            None => all.push(stage),
        }
    }
}

/// What each device says of itself for this checkpoint: its name with the kernel path, or why it cannot run it.
pub fn probe(args: &ModelArgs, checkpoint: &Arc<Checkpoint>) -> Vec<String> {
    let describe = |device| match load(&args.on(device), Arc::clone(checkpoint)) {
        Ok(backend) => backend.caps().name.clone(),
        Err(error) => format!("{error:#}"),
    };
    ALL.map(describe).to_vec()
}

/// The devices that a build for this machine can have, the slowest first.
pub const ALL: [BackendName; 3] = [BackendName::Cpu, BackendName::Cuda, BackendName::Metal];

/// How far the logits of a device may be from those of the reference, relative to the largest, and why.
pub fn budget(backend: BackendName, kv: KvType) -> (f32, &'static str) {
    match (backend, kv) {
        (_, KvType::Bf16) => (2e-2, "keys and values are rounded to BF16"),
        (BackendName::Metal, KvType::F32) => (2e-3, "f32 in another order, functions of the device"),
        (_, KvType::F32) => (4e-3, "inputs of linears are rounded to 16 bits"),
    }
}

/// What becomes of every kernel that a device compiles for a shape, as far as it says.
pub fn kernels(backend: BackendName, shape: &Shape, kv: KvType) -> anyhow::Result<Vec<lily_metal::KernelReport>> {
    match backend {
        BackendName::Metal => Ok(lily_metal::survey(shape, metal_kv(kv))?),
        _ => Ok(Vec::new()),
    }
}

fn metal_kv(kv: KvType) -> lily_metal::KvDtype {
    match kv {
        KvType::F32 => lily_metal::KvDtype::F32,
        KvType::Bf16 => lily_metal::KvDtype::Bf16,
    }
}

/// Threads of this machine that the chosen device works with.
pub fn threads(args: &DeviceArgs) -> usize {
    match args.backend {
        BackendName::Reference => 1,
        _ => args.threads.unwrap_or_else(lily_cpu::default_threads),
    }
}

fn kv_dtype(kv: KvType) -> KvDtype {
    match kv {
        KvType::F32 => KvDtype::F32,
        KvType::Bf16 => KvDtype::Bf16,
    }
}

/// Bytes that are left for activations, stdin and the rest of the system when the context is chosen by memory.
const MARGIN_BYTES: usize = 1 << 30;
/// A context that any machine is given, however little memory it reports: short conversations still work.
const SMALLEST_DEFAULT_CONTEXT: usize = 2048;

/// The context asked for, checked; or as much as fits into the free memory.
fn context(args: &ModelArgs, checkpoint: &Checkpoint) -> anyhow::Result<usize> {
    let shape = &checkpoint.config.shape;
    if let Some(ctx) = args.ctx {
        if (1..=shape.max_context).contains(&ctx) {
            return Ok(ctx);
        }
        let most = grouped(shape.max_context);
        return Err(Usage(format!("--ctx {ctx}: expected 1 to {most}, the context the model was trained for")).into());
    }
    let per_token = shape.kv_bytes_per_token(args.device.kv.bytes());
    let taken = resident_weights(checkpoint) + shape.recurrent_bytes() + MARGIN_BYTES;
    let fitting = available_memory().saturating_sub(taken) / per_token;
    let chosen = fitting.clamp(SMALLEST_DEFAULT_CONTEXT.min(shape.max_context), shape.max_context);
    if chosen < shape.max_context {
        tracing::info!(
            "context limited to {} tokens by {} of free memory; --ctx sets another limit",
            grouped(chosen),
            bytes(available_memory())
        );
    }
    Ok(chosen)
}

/// Bytes that the sessions of a server may take where they lie in the memory of the host: half of what is free, since the rest of the
/// machine is wanted, too. `None` where a device has memory of its own and says when it is full.
pub fn session_memory(backend: &dyn Backend, checkpoint: &Checkpoint) -> Option<usize> {
    if backend.caps().own_memory {
        return None;
    }
    Some(available_memory().saturating_sub(resident_weights(checkpoint)).saturating_sub(MARGIN_BYTES) / 2)
}

/// The machine in words: processor, cores, memory, version of the system.
pub fn system() -> String {
    let system = sysinfo::System::new_with_specifics(
        sysinfo::RefreshKind::nothing()
            .with_cpu(sysinfo::CpuRefreshKind::nothing())
            .with_memory(sysinfo::MemoryRefreshKind::everything()),
    );
    let processor = system.cpus().first().map_or("unknown processor", |cpu| cpu.brand()).trim().to_owned();
    let version = sysinfo::System::long_os_version().unwrap_or_else(|| "unknown system".into());
    let memory = usize::try_from(system.total_memory()).unwrap_or(usize::MAX);
    format!("{version}, {processor}, {} cores, {}", system.cpus().len(), bytes(memory))
}

/// Memory that this process could take without pushing others out, in bytes. Cached files count as free, also those of
/// the container that it may run in: the weights are such files themselves.
pub fn available_memory() -> usize {
    let mut system = sysinfo::System::new();
    system.refresh_memory();
    let machine = system.available_memory();
    let container = system.cgroup_limits().map_or(u64::MAX, |limits| limits.total_memory.saturating_sub(limits.rss));
    usize::try_from(machine.min(container)).unwrap_or(usize::MAX)
}

/// Memory of this process in use now, in bytes.
pub fn resident_memory() -> usize {
    let Ok(pid) = sysinfo::get_current_pid() else { return 0 };
    let mut system = sysinfo::System::new();
    system.refresh_processes(sysinfo::ProcessesToUpdate::Some(&[pid]), false);
    system.process(pid).map_or(0, |p| usize::try_from(p.memory()).unwrap_or(usize::MAX))
}

/// Bytes that the weights need in memory to be read at full speed; those inside the binary or
/// made in memory are there already.
pub fn resident_weights(checkpoint: &Checkpoint) -> usize {
    match checkpoint.source {
        Source::Directory(_) => checkpoint.weights.quantized_bytes(),
        Source::Embedded(_) | Source::Memory(_) => 0,
    }
}
