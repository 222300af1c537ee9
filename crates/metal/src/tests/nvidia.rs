//! The whole backend on an NVIDIA GPU, through clang's CUDA mode: the same files with true concurrency, and layers of the full size.
//! tools/metal-on-nvidia.sh says how this is built and run.

use std::collections::HashMap;
use std::path::PathBuf;

use lily_backend::Backend;
use lily_backend::conformance::Subject;
use lily_metal_emu as emu;
use lily_metal_emu::nvidia::{self, Address, Nvidia};
use lily_model::{Checkpoint, MappedFile, Shape};
use lily_reference::golden::{Goldens, compare_logits, tiny_checkpoint};
use lily_reference::{Logits, Reference};

use super::{TOLERANCE, load_on, logits};
use crate::KvDtype;
use crate::device::{
    Bound, Buffer, Command, Commit, Dispatch, Gpu, KernelSpec, Language, Pipeline, Slice, Source, device_error,
};

/// What is compiled and recorded, beside the test.
fn folder() -> PathBuf {
    let program = std::env::current_exe().expect("the name of this program");
    program.parent().expect("the folder of this program").join("metal-nvidia")
}

fn language(language: Language) -> emu::Language {
    match language {
        Language::Metal3_2 => emu::Language::Metal3_2,
        Language::Metal4_0 => emu::Language::Metal4_0,
    }
}

/// Words of all dispatches of a command buffer.
const WORDS_BYTES: usize = 1 << 20;

/// A Metal device made of an NVIDIA GPU. It does what it is told at once.
struct OnNvidia {
    gpu: Nvidia,
    tensor_units: bool,
    buffers: HashMap<u32, (Address, usize)>,
    pipelines: Vec<nvidia::Pipeline>,
    words: Address,
    next_buffer: u32,
    /// Why a commit failed.
    failed: Option<String>,
}

impl OnNvidia {
    fn new(tensor_units: bool) -> OnNvidia {
        let mut gpu = Nvidia::open(&folder()).expect("an NVIDIA GPU");
        let words = gpu.allocate(WORDS_BYTES).expect("memory");
        let (buffers, pipelines) = (HashMap::new(), Vec::new());
        OnNvidia { gpu, tensor_units, buffers, pipelines, words, next_buffer: 0, failed: None }
    }

    fn address(&self, slice: Slice) -> Address {
        let (start, bytes) = self.buffers[&slice.buffer.0];
        assert!(slice.offset + slice.bytes <= bytes, "a slice beyond the {bytes} bytes of its buffer");
        start.offset(slice.offset)
    }

    fn bytes_mut(&mut self, slice: Slice) -> &mut [u8] {
        let address = self.address(slice);
        // SAFETY: the slice lies inside its buffer, and commits are finished before they return.
        unsafe { self.gpu.bytes_mut(address, slice.bytes) }
    }

    fn launch(&mut self, dispatch: &Dispatch, words: &mut usize) -> emu::Result<()> {
        let mut bound = Vec::with_capacity(dispatch.bound.len());
        for slot in &dispatch.bound {
            bound.push(match slot {
                Bound::Read(slice) | Bound::Write(slice) => self.address(*slice),
                Bound::Words(values, count) => {
                    const ROOM: usize = 32;
                    assert!(*words + ROOM <= WORDS_BYTES, "more words than there is room for");
                    let at = self.words.offset(*words);
                    *words += ROOM;
                    let bytes: Vec<u8> = values[..*count].iter().flat_map(|word| word.to_le_bytes()).collect();
                    // SAFETY: there is room, and no launch that was begun uses it.
                    unsafe { self.gpu.bytes_mut(at, bytes.len()) }.copy_from_slice(&bytes);
                    at
                }
            });
        }
        let groups = dispatch.groups.map(|groups| groups as u32);
        let pipeline = self.pipelines[dispatch.pipeline.0 as usize];
        // SAFETY: the emulator has held the same dispatches to what is bound.
        unsafe { self.gpu.launch(pipeline, &bound, groups, dispatch.threads as u32) }
    }
}

impl Gpu for OnNvidia {
    fn name(&self) -> String {
        self.gpu.name().into()
    }

    fn tensor_units(&self) -> std::result::Result<(), String> {
        if self.tensor_units { Ok(()) } else { Err("not asked for".into()) }
    }

    fn memory_bytes(&self) -> usize {
        8 << 30
    }

    fn machine_bytes(&self) -> usize {
        16 << 30
    }

    fn buffer(&mut self, bytes: usize, _what: &str) -> lily_backend::Result<Buffer> {
        let address = self.gpu.allocate(bytes).map_err(device_error)?;
        let id = self.next_buffer;
        self.next_buffer += 1;
        self.buffers.insert(id, (address, bytes));
        Ok(Buffer(id))
    }

    fn map(&mut self, _file: &MappedFile) -> lily_backend::Result<Option<Buffer>> {
        Ok(None)
    }

    fn free(&mut self, buffer: Buffer) {
        let (address, _) = self.buffers.remove(&buffer.0).expect("a buffer is freed once");
        // SAFETY: it was allocated, and nothing has its address any more.
        unsafe { self.gpu.free(address) }.expect("freed");
    }

    fn pipeline(&mut self, source: &Source, spec: &KernelSpec<'_>) -> lily_backend::Result<Pipeline> {
        let constants: Vec<(&str, u32)> = spec.constants.iter().map(|(name, value)| (*name, *value as u32)).collect();
        let made = self.gpu.pipeline(&source.text, language(source.language), spec.kernel, &constants);
        self.pipelines.push(made.map_err(device_error)?);
        Ok(Pipeline(self.pipelines.len() as u32 - 1))
    }

    fn read(&self, from: Slice, to: &mut [u8]) -> lily_backend::Result<()> {
        // SAFETY: as in `bytes_mut`.
        to.copy_from_slice(unsafe { self.gpu.bytes(self.address(from), from.bytes) });
        Ok(())
    }

    fn write(&mut self, to: Slice, from: &[u8]) -> lily_backend::Result<()> {
        self.bytes_mut(to).copy_from_slice(from);
        Ok(())
    }

    fn contents(&mut self, buffer: Buffer) -> lily_backend::Result<&mut [u8]> {
        let bytes = self.buffers[&buffer.0].1;
        Ok(self.bytes_mut(Slice { buffer, offset: 0, bytes }))
    }

    fn copy(&mut self, from: Slice, to: Slice) -> lily_backend::Result<()> {
        let bytes = self.bytes_mut(from).to_vec();
        self.write(to, &bytes)
    }

    fn clear(&mut self, slice: Slice) -> lily_backend::Result<()> {
        self.bytes_mut(slice).fill(0);
        Ok(())
    }

    fn commit(&mut self, commands: Vec<Command>) -> lily_backend::Result<Commit> {
        let mut words = 0;
        let launched = commands.iter().try_for_each(|command| match command {
            Command::Dispatch(dispatch) => self.launch(dispatch, &mut words),
            // Launches of one stream wait for each other.
            Command::Barrier => Ok(()),
        });
        if let Err(error) = launched.and_then(|()| self.gpu.finish()) {
            self.failed.get_or_insert(error.to_string());
        }
        Ok(Commit(0))
    }

    fn wait(&mut self, _commit: Commit) -> lily_backend::Result<()> {
        self.failed.clone().map_or(Ok(()), |failed| Err(device_error(failed)))
    }
}

/// Compiles what it is asked for, and runs nothing.
struct Compiling;

impl Gpu for Compiling {
    fn name(&self) -> String {
        "clang".into()
    }

    fn tensor_units(&self) -> std::result::Result<(), String> {
        Ok(())
    }

    fn memory_bytes(&self) -> usize {
        0
    }

    fn machine_bytes(&self) -> usize {
        0
    }

    fn buffer(&mut self, _bytes: usize, _what: &str) -> lily_backend::Result<Buffer> {
        Err(device_error("nothing is run"))
    }

    fn pipeline(&mut self, source: &Source, _spec: &KernelSpec<'_>) -> lily_backend::Result<Pipeline> {
        nvidia::compile(&folder(), source.name, &source.text, language(source.language)).map_err(device_error)?;
        Ok(Pipeline(0))
    }

    fn map(&mut self, _file: &MappedFile) -> lily_backend::Result<Option<Buffer>> {
        Ok(None)
    }

    fn free(&mut self, _buffer: Buffer) {}

    fn read(&self, _from: Slice, _to: &mut [u8]) -> lily_backend::Result<()> {
        Err(device_error("nothing is run"))
    }

    fn write(&mut self, _to: Slice, _from: &[u8]) -> lily_backend::Result<()> {
        Err(device_error("nothing is run"))
    }

    fn contents(&mut self, _buffer: Buffer) -> lily_backend::Result<&mut [u8]> {
        Err(device_error("nothing is run"))
    }

    fn copy(&mut self, _from: Slice, _to: Slice) -> lily_backend::Result<()> {
        Err(device_error("nothing is run"))
    }

    fn clear(&mut self, _slice: Slice) -> lily_backend::Result<()> {
        Err(device_error("nothing is run"))
    }

    fn commit(&mut self, _commands: Vec<Command>) -> lily_backend::Result<Commit> {
        Err(device_error("nothing is run"))
    }

    fn wait(&mut self, _commit: Commit) -> lily_backend::Result<()> {
        Err(device_error("nothing is run"))
    }
}

/// Layers of the full-size model, with fewer experts (eight of them are read) and a smaller vocabulary.
const WIDE: Shape = Shape { layers: 4, vocab: 1024, experts: 24, ..Shape::QWEN36 };
/// A prompt of a full tile of rows and a part of one, and tokens one by one after it.
fn wide_ids() -> Vec<u32> {
    (0..80).map(|i| (i * 97 + 11) % WIDE.vocab as u32).collect()
}
const WIDE_PROMPT: usize = 76;

fn wide_checkpoint() -> Checkpoint {
    Checkpoint::load(lily_synth::in_memory("wide", &WIDE, 1).expect("a checkpoint")).expect("loaded")
}

fn recorded_logits() -> PathBuf {
    folder().join("wide.logits")
}

/// Run where clang is: all kernels of these tests, and what the reference makes of the full-size layers.
#[test]
#[ignore = "prepares for an NVIDIA GPU: tools/metal-on-nvidia.sh build"]
fn kernels_are_compiled_and_outputs_recorded() {
    for (shape, kv) in [(lily_synth::TINY, KvDtype::F32), (lily_synth::TINY, KvDtype::Bf16), (WIDE, KvDtype::F32)] {
        let reports = crate::plan::survey(&mut Compiling, &shape, kv).expect("a survey");
        let failed = reports.iter().filter(|report| report.instead.is_none()).find_map(|report| report.error.as_ref());
        assert!(failed.is_none(), "{}", failed.map_or("", |error| error));
    }
    let checkpoint = wide_checkpoint();
    let reference = Reference::new(&checkpoint);
    let logits = reference.forward(&mut reference.new_state(), &wide_ids(), Logits::All);
    std::fs::write(recorded_logits(), crate::device::float_bytes(&logits)).expect("written");
}

#[test]
#[ignore = "needs an NVIDIA GPU: tools/metal-on-nvidia.sh run"]
fn tiny_logits_are_those_of_the_goldens_on_nvidia() {
    let goldens = Goldens::tiny();
    let checkpoint = Checkpoint::open(tiny_checkpoint()).expect("the tiny checkpoint");
    for tensor_units in [false, true] {
        let mut backend = load_on(OnNvidia::new(tensor_units), &checkpoint, KvDtype::F32);
        for length in goldens.lengths().into_iter().filter(|length| *length <= 65) {
            let prompt = goldens.prompt(length);
            let state = backend.new_state(length).expect("a state");
            let found = logits(&mut backend, state, &prompt.ids);
            let worst =
                compare_logits(&found, &prompt.logits, 1024, TOLERANCE).unwrap_or_else(|e| panic!("{length}: {e}"));
            println!("{}, {length} tokens: largest difference {worst:e}", backend.caps().name);
            backend.free_state(state).expect("freed");
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: tools/metal-on-nvidia.sh run"]
fn full_size_layers_are_those_of_the_reference_on_nvidia() {
    let bytes = std::fs::read(recorded_logits()).expect("recorded logits");
    let expected: Vec<f32> = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let (checkpoint, ids) = (wide_checkpoint(), wide_ids());
    for tensor_units in [false, true] {
        let mut backend = load_on(OnNvidia::new(tensor_units), &checkpoint, KvDtype::F32);
        let state = backend.new_state(ids.len()).expect("a state");
        let (prompt, rest) = ids.split_at(WIDE_PROMPT);
        let mut found = logits(&mut backend, state, prompt);
        rest.iter().for_each(|id| found.extend(logits(&mut backend, state, &[*id])));
        let worst = compare_logits(&found, &expected, WIDE.vocab, 2e-3).unwrap_or_else(|e| panic!("{e}"));
        println!("{}: largest difference {worst:e}", backend.caps().name);
        backend.reset_state(state).expect("reset");
        assert!(found[..prompt.len() * WIDE.vocab] == logits(&mut backend, state, prompt), "the same bits again");
    }
}

lily_backend::conformance_suite! {
    // As on the emulator.
    #[ignore = "needs an NVIDIA GPU: tools/metal-on-nvidia.sh run"]
    laws: Subject {
        load: &|| {
            let checkpoint = Checkpoint::open(tiny_checkpoint()).expect("the tiny checkpoint");
            Box::new(load_on(OnNvidia::new(true), &checkpoint, KvDtype::Bf16))
        },
        budget: 2e-3,
        experts_per_token: 2,
    };
}
