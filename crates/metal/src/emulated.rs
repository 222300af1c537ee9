//! [`Gpu`] on the emulator.

use std::collections::HashMap;

use lily_backend::Result;
use lily_metal_emu::{self as emu, Emulator, LibraryId, PipelineId};
use lily_model::MappedFile;

use crate::device::{
    Bound, Buffer, Command, Commit, Dispatch, Gpu, KernelSpec, Language, Pipeline, Slice, Source, device_error,
};

/// A GPU of the mind.
pub(crate) struct Emulated {
    pub(crate) emulator: Emulator,
    buffers: HashMap<u32, emu::BufferId>,
    libraries: HashMap<&'static str, (String, LibraryId)>,
    /// With the threads that each was made for.
    pipelines: Vec<(PipelineId, usize)>,
    commits: Vec<emu::CommitId>,
    next_buffer: u32,
    /// Dispatches and barriers of the last commit.
    pub(crate) counts: (usize, usize),
    /// Whether it has tensor units.
    tensor_units: bool,
    /// See `refusing`.
    refuses: Option<&'static str>,
    /// See `misreading`.
    misreads: Option<(&'static str, &'static str)>,
    /// Bytes that it says it and its machine have.
    pub(crate) memory: [usize; 2],
}

impl Emulated {
    /// With the order of work that `order` chooses, see [`Emulator::new`].
    pub(crate) fn new(order: u32) -> Emulated {
        Emulated {
            emulator: Emulator::new(order).expect("memory for an emulator"),
            buffers: HashMap::new(),
            libraries: HashMap::new(),
            pipelines: Vec::new(),
            commits: Vec::new(),
            next_buffer: 0,
            counts: (0, 0),
            tensor_units: false,
            refuses: None,
            misreads: None,
            memory: [8 << 30, 12 << 30],
        }
    }

    /// The same with tensor units.
    pub(crate) fn with_tensor_units(order: u32) -> Emulated {
        Emulated { tensor_units: true, ..Emulated::new(order) }
    }

    /// It refuses this file or kernel; of a kernel in two languages that of the later one.
    pub(crate) fn refusing(self, refused: &'static str) -> Emulated {
        Emulated { refuses: Some(refused), ..self }
    }

    /// In files of Metal 4 it reads `instead` for `what`.
    pub(crate) fn misreading(self, what: &'static str, instead: &'static str) -> Emulated {
        Emulated { misreads: Some((what, instead)), ..self }
    }

    /// Whether this is a file or kernel that it refuses.
    fn refuses(&self, source: &Source, kernel: &str) -> bool {
        let is_meant = self.refuses == Some(kernel) || self.refuses == Some(source.name);
        is_meant && (!self.tensor_units || source.language == Language::Metal4_0)
    }

    pub(crate) fn slice(&self, slice: Slice) -> emu::Slice {
        emu::Slice { buffer: self.buffers[&slice.buffer.0], offset: slice.offset, bytes: slice.bytes }
    }

    fn pipeline_for(&self, dispatch: &Dispatch) -> PipelineId {
        let (pipeline, threads) = self.pipelines[dispatch.pipeline.0 as usize];
        assert_eq!(dispatch.threads, threads, "threads that the pipeline was not made for");
        pipeline
    }

    fn bound(&self, bound: &Bound) -> emu::Bound {
        match bound {
            Bound::Read(slice) => emu::Bound::Read(self.slice(*slice)),
            Bound::Write(slice) => emu::Bound::Write(self.slice(*slice)),
            Bound::Words(words, count) => {
                emu::Bound::Bytes(words[..*count].iter().flat_map(|word| word.to_le_bytes()).collect())
            }
        }
    }
}

impl Gpu for Emulated {
    fn name(&self) -> String {
        "emulated".into()
    }

    fn tensor_units(&self) -> std::result::Result<(), String> {
        if self.tensor_units { Ok(()) } else { Err("an emulator without tensor units".into()) }
    }

    fn memory_bytes(&self) -> usize {
        self.memory[0]
    }

    fn machine_bytes(&self) -> usize {
        self.memory[1]
    }

    fn buffer(&mut self, bytes: usize, _what: &str) -> Result<Buffer> {
        let buffer = self.emulator.buffer(bytes, false).map_err(device_error)?;
        let id = self.next_buffer;
        self.next_buffer += 1;
        self.buffers.insert(id, buffer);
        Ok(Buffer(id))
    }

    fn map(&mut self, file: &MappedFile) -> Result<Option<Buffer>> {
        let Some(opened) = file.file() else { return Ok(None) };
        let buffer = self.emulator.map(opened, file.bytes().len()).map_err(device_error)?;
        let id = self.next_buffer;
        self.next_buffer += 1;
        self.buffers.insert(id, buffer);
        Ok(Some(Buffer(id)))
    }

    fn free(&mut self, buffer: Buffer) {
        let buffer = self.buffers.remove(&buffer.0).expect("a buffer is freed once");
        self.emulator.free(buffer).expect("a buffer is freed when nothing uses it");
    }

    fn pipeline(&mut self, source: &Source, spec: &KernelSpec<'_>) -> Result<Pipeline> {
        if self.refuses(source, spec.kernel) {
            return Err(device_error("a kernel that it does not take"));
        }
        let known = self.libraries.get(source.name).filter(|(text, _)| *text == source.text);
        let (text, language) = match (source.language, self.misreads) {
            (Language::Metal3_2, _) => (source.text.clone(), emu::Language::Metal3_2),
            (Language::Metal4_0, None) => (source.text.clone(), emu::Language::Metal4_0),
            (Language::Metal4_0, Some((what, instead))) => {
                assert!(source.text.contains(what), "{what} is not in {}", source.name);
                (source.text.replace(what, instead), emu::Language::Metal4_0)
            }
        };
        let library = match known {
            Some((_, library)) => *library,
            None => {
                let library = self.emulator.library(source.name, &text, language).map_err(device_error)?;
                self.libraries.insert(source.name, (source.text.clone(), library));
                library
            }
        };
        let constants: Vec<(&str, u32)> = spec.constants.iter().map(|(name, value)| (*name, *value as u32)).collect();
        let pipeline = self.emulator.pipeline(library, spec.kernel, &constants).map_err(device_error)?;
        self.pipelines.push((pipeline, spec.threads));
        Ok(Pipeline(self.pipelines.len() as u32 - 1))
    }

    fn read(&self, from: Slice, to: &mut [u8]) -> Result<()> {
        to.copy_from_slice(self.emulator.read(self.slice(from)).map_err(device_error)?);
        Ok(())
    }

    fn write(&mut self, to: Slice, from: &[u8]) -> Result<()> {
        self.emulator.write(self.slice(to)).map_err(device_error)?.copy_from_slice(from);
        Ok(())
    }

    fn contents(&mut self, buffer: Buffer) -> Result<&mut [u8]> {
        let buffer = self.buffers[&buffer.0];
        self.emulator.contents(buffer).map_err(device_error)
    }

    fn copy(&mut self, from: Slice, to: Slice) -> Result<()> {
        self.emulator.copy(self.slice(from), self.slice(to)).map_err(device_error)
    }

    fn clear(&mut self, slice: Slice) -> Result<()> {
        self.emulator.write(self.slice(slice)).map_err(device_error)?.fill(0);
        Ok(())
    }

    fn commit(&mut self, commands: Vec<Command>) -> Result<Commit> {
        let barriers = commands.iter().filter(|command| matches!(command, Command::Barrier)).count();
        self.counts = (commands.len() - barriers, barriers);
        let commands = commands.iter().map(|command| match command {
            Command::Barrier => emu::Command::Barrier,
            Command::Dispatch(dispatch) => emu::Command::Dispatch(emu::Dispatch {
                pipeline: self.pipeline_for(dispatch),
                bindings: dispatch.bound.iter().map(|bound| self.bound(bound)).enumerate().collect(),
                threadgroup: Vec::new(),
                groups: [dispatch.groups[0] as u32, dispatch.groups[1] as u32, 1],
                threads: [dispatch.threads as u32, 1, 1],
            }),
        });
        let commit = self.emulator.commit(commands.collect()).map_err(device_error)?;
        self.commits.push(commit);
        Ok(Commit(self.commits.len() as u64 - 1))
    }

    fn wait(&mut self, commit: Commit) -> Result<()> {
        self.emulator.wait(self.commits[commit.0 as usize]).map_err(device_error)
    }
}
