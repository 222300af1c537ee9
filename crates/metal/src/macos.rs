//! [`Gpu`] on the Metal device of a Mac.
//!
//! Buffers are shared with the host and tracked, so that command buffers run in the order of their writes; inside one, a
//! concurrent encoder waits only at the barriers of the pass. A residency set keeps everything wired while the queue lives.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::ptr::NonNull;

use lily_backend::{Error, Result};
use lily_model::MappedFile;
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::{AnyClass, ProtocolObject};
use objc2_foundation::{NSError, NSProcessInfo, NSString};
use objc2_metal::{
    MTLAllocation, MTLBarrierScope, MTLBuffer, MTLCommandBuffer, MTLCommandBufferStatus, MTLCommandEncoder,
    MTLCommandQueue, MTLCompileOptions, MTLComputeCommandEncoder, MTLComputePipelineState,
    MTLCreateSystemDefaultDevice, MTLDataType, MTLDevice, MTLDispatchType, MTLFunctionConstantValues, MTLGPUFamily,
    MTLLanguageVersion, MTLLibrary, MTLMathMode, MTLResidencySet, MTLResidencySetDescriptor, MTLResourceOptions,
    MTLSize,
};

use crate::device::{
    Bound, Buffer, Command, Commit, Dispatch, Gpu, KernelSpec, Language, Pipeline, Slice, Source, device_error,
};
use crate::room;

// The system's default device is only found by processes that link this.
#[link(name = "CoreGraphics", kind = "framework")]
unsafe extern "C" {}

/// A page of Apple's processors.
const PAGE_BYTES: usize = 16 << 10;

type Device = Retained<ProtocolObject<dyn MTLDevice>>;
type DeviceBuffer = Retained<ProtocolObject<dyn MTLBuffer>>;
type Library = Retained<ProtocolObject<dyn MTLLibrary>>;

/// A Mac's GPU.
pub(crate) struct MacGpu {
    device: Device,
    queue: Retained<ProtocolObject<dyn MTLCommandQueue>>,
    resident: Retained<ProtocolObject<dyn MTLResidencySet>>,
    buffers: HashMap<u32, DeviceBuffer>,
    /// What some of the buffers are made of.
    files: HashMap<u32, MappedFile>,
    libraries: HashMap<&'static str, (String, Library)>,
    pipelines: Vec<Retained<ProtocolObject<dyn MTLComputePipelineState>>>,
    /// Committed and not waited for.
    commits: VecDeque<(Commit, Retained<ProtocolObject<dyn MTLCommandBuffer>>)>,
    next_buffer: u32,
    next_commit: u64,
}

// SAFETY: Metal's devices, queues, buffers, libraries, pipelines and committed command buffers may be used from any thread; all
// of these belong to this value alone, which one thread uses at a time.
unsafe impl Send for MacGpu {}

fn unavailable(reason: impl Into<String>) -> Error {
    Error::Unavailable { name: "metal", reason: reason.into() }
}

fn words_of(error: &NSError) -> String {
    error.localizedDescription().to_string()
}

impl MacGpu {
    /// The system's default device, if it is one that the kernels are for.
    pub(crate) fn open() -> Result<MacGpu> {
        // Classes that an older system lacks are looked up by name, and their absence would end the process.
        if AnyClass::get(c"MTLResidencySetDescriptor").is_none() {
            return Err(unavailable("it needs macOS 15 or newer"));
        }
        autoreleasepool(|_| {
            let device = MTLCreateSystemDefaultDevice().ok_or_else(|| unavailable("there is no Metal device"))?;
            if !device.supportsFamily(MTLGPUFamily::Apple7) {
                let name = device.name();
                return Err(unavailable(format!("{name} is no Apple GPU of M1 or newer")));
            }
            let queue = device.newCommandQueue().ok_or_else(|| device_error("no command queue"))?;
            let resident = device
                .newResidencySetWithDescriptor_error(&MTLResidencySetDescriptor::new())
                .map_err(|error| device_error(words_of(&error)))?;
            queue.addResidencySet(&resident);
            Ok(MacGpu {
                device,
                queue,
                resident,
                buffers: HashMap::new(),
                files: HashMap::new(),
                libraries: HashMap::new(),
                pipelines: Vec::new(),
                commits: VecDeque::new(),
                next_buffer: 0,
                next_commit: 0,
            })
        })
    }

    /// Makes a buffer resident, as long as it is kept.
    fn keep(&mut self, buffer: DeviceBuffer) -> Buffer {
        let allocation: &ProtocolObject<dyn MTLAllocation> = ProtocolObject::from_ref(&*buffer);
        self.resident.addAllocation(allocation);
        self.resident.commit();
        // Now, and not before the first command that uses it.
        self.resident.requestResidency();
        let id = self.next_buffer;
        self.next_buffer += 1;
        self.buffers.insert(id, buffer);
        Buffer(id)
    }

    fn buffer_of(&self, slice: Slice) -> Result<&DeviceBuffer> {
        let buffer = self.buffers.get(&slice.buffer.0).ok_or_else(|| device_error("a buffer that was freed"))?;
        match slice.offset.checked_add(slice.bytes).is_some_and(|end| end <= buffer.length()) {
            true => Ok(buffer),
            false => Err(device_error(format!("a slice beyond the {} bytes of its buffer", buffer.length()))),
        }
    }

    /// The first byte of a slice, of which at least `slice.bytes` are there.
    fn start_of(&self, slice: Slice) -> Result<*mut u8> {
        let contents = self.buffer_of(slice)?.contents().cast::<u8>();
        // SAFETY: `buffer_of` has checked that the offset lies inside the buffer.
        Ok(unsafe { contents.as_ptr().add(slice.offset) })
    }

    fn library(&mut self, source: &Source) -> Result<Library> {
        if let Some((text, library)) = self.libraries.get(source.name)
            && *text == source.text
        {
            return Ok(library.clone());
        }
        let options = MTLCompileOptions::new();
        options.setLanguageVersion(match source.language {
            Language::Metal3_2 => MTLLanguageVersion::Version3_2,
            Language::Metal4_0 => MTLLanguageVersion::Version4_0,
        });
        // Fast math would take infinities and NaN as absent, which masks and checks are made of.
        options.setMathMode(MTLMathMode::Safe);
        let text = NSString::from_str(&source.text);
        let library = self.device.newLibraryWithSource_options_error(&text, Some(&options));
        let library = library.map_err(|error| device_error(format!("{}: {}", source.name, words_of(&error))))?;
        self.libraries.insert(source.name, (source.text.clone(), library.clone()));
        Ok(library)
    }

    fn encode(&self, encoder: &ProtocolObject<dyn MTLComputeCommandEncoder>, dispatch: &Dispatch) -> Result<()> {
        let pipeline =
            self.pipelines.get(dispatch.pipeline.0 as usize).ok_or_else(|| device_error("no such pipeline"))?;
        encoder.setComputePipelineState(pipeline);
        for (slot, bound) in dispatch.bound.iter().enumerate() {
            match bound {
                Bound::Read(slice) | Bound::Write(slice) => {
                    let buffer = self.buffer_of(*slice)?;
                    // SAFETY: the slice lies inside the buffer, and the emulator has held kernels to their slices.
                    unsafe { encoder.setBuffer_offset_atIndex(Some(buffer), slice.offset, slot) };
                }
                Bound::Words(words, count) => {
                    let bytes = NonNull::from(&words[..*count]).cast::<c_void>();
                    // SAFETY: so many words are there, and Metal copies them before it returns.
                    unsafe { encoder.setBytes_length_atIndex(bytes, count * size_of::<u32>(), slot) };
                }
            }
        }
        let size = |width, height| MTLSize { width, height, depth: 1 };
        let [width, height] = dispatch.groups;
        encoder.dispatchThreadgroups_threadsPerThreadgroup(size(width, height), size(dispatch.threads, 1));
        Ok(())
    }
}

impl Gpu for MacGpu {
    fn name(&self) -> String {
        self.device.name().to_string()
    }

    fn tensor_units(&self) -> std::result::Result<(), String> {
        // A system answers no for families that it has never heard of.
        match (self.device.supportsFamily(MTLGPUFamily::Apple10), self.device.supportsFamily(MTLGPUFamily::Metal4)) {
            (false, _) => Err("GPUs before that of M5 have no tensor units".into()),
            (true, false) => Err("Metal 4 needs macOS 26 or newer".into()),
            (true, true) => Ok(()),
        }
    }

    fn memory_bytes(&self) -> usize {
        usize::try_from(self.device.recommendedMaxWorkingSetSize()).unwrap_or(usize::MAX)
    }

    fn machine_bytes(&self) -> usize {
        usize::try_from(NSProcessInfo::processInfo().physicalMemory()).unwrap_or(usize::MAX)
    }

    fn buffer(&mut self, bytes: usize, what: &str) -> Result<Buffer> {
        // Metal has no empty buffers.
        let buffer = self.device.newBufferWithLength_options(bytes.max(1), MTLResourceOptions::StorageModeShared);
        let buffer = buffer.ok_or_else(|| {
            let allocated = self.device.currentAllocatedSize();
            let available = self.memory_bytes().saturating_sub(allocated);
            Error::OutOfMemory { what: what.into(), needed: bytes, available }
        })?;
        Ok(self.keep(buffer))
    }

    fn map(&mut self, file: &MappedFile) -> Result<Option<Buffer>> {
        let bytes = file.bytes();
        let length = bytes.len().next_multiple_of(PAGE_BYTES);
        if length > self.device.maxBufferLength() {
            return Ok(None);
        }
        let pages = NonNull::from(bytes).cast::<c_void>();
        // SAFETY: the map begins on a page and holds whole ones. `files` keeps it as long as the buffer is kept, and `drop` waits for
        // what the GPU does with it. Slices of it are bound for reading alone, which the emulator has held kernels to, and the host
        // writes no buffer of weights.
        let buffer = unsafe {
            self.device.newBufferWithBytesNoCopy_length_options_deallocator(
                pages,
                length,
                MTLResourceOptions::StorageModeShared,
                None,
            )
        };
        Ok(buffer.map(|buffer| {
            let id = self.keep(buffer);
            self.files.insert(id.0, file.clone());
            id
        }))
    }

    fn free(&mut self, buffer: Buffer) {
        if let Some(buffer) = self.buffers.remove(&buffer.0) {
            let allocation: &ProtocolObject<dyn MTLAllocation> = ProtocolObject::from_ref(&*buffer);
            self.resident.removeAllocation(allocation);
            self.resident.commit();
        }
        self.files.remove(&buffer.0);
    }

    fn pipeline(&mut self, source: &Source, spec: &KernelSpec<'_>) -> Result<Pipeline> {
        let KernelSpec { kernel, constants, threads } = *spec;
        autoreleasepool(|_| {
            let library = self.library(source)?;
            let failed = |error: Retained<NSError>| device_error(format!("{kernel}: {}", words_of(&error)));
            let values = MTLFunctionConstantValues::new();
            for (name, value) in constants {
                let value = *value as u32;
                let (pointer, name) = (NonNull::from(&value).cast::<c_void>(), NSString::from_str(name));
                // SAFETY: the pointer is to a u32, as the type says, and Metal copies it before it returns.
                unsafe { values.setConstantValue_type_withName(pointer, MTLDataType::UInt, &name) };
            }
            let function = library
                .newFunctionWithName_constantValues_error(&NSString::from_str(kernel), &values)
                .map_err(failed)?;
            let pipeline = self.device.newComputePipelineStateWithFunction_error(&function).map_err(failed)?;
            let (width, most) = (pipeline.threadExecutionWidth(), pipeline.maxTotalThreadsPerThreadgroup());
            if width != crate::kernels::LANES || most < threads {
                return Err(unavailable(format!(
                    "{kernel} needs threadgroups of {threads} threads in simdgroups of {}; this GPU has {most} in {width}",
                    crate::kernels::LANES
                )));
            }
            self.pipelines.push(pipeline);
            Ok(Pipeline(self.pipelines.len() as u32 - 1))
        })
    }

    fn read(&self, from: Slice, to: &mut [u8]) -> Result<()> {
        assert_eq!(from.bytes, to.len());
        let start = self.start_of(from)?;
        // SAFETY: the bytes are there, `to` is the host's own, and no commit that was not waited for uses the slice.
        unsafe { std::ptr::copy_nonoverlapping(start, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    fn write(&mut self, to: Slice, from: &[u8]) -> Result<()> {
        assert_eq!(to.bytes, from.len());
        let start = self.start_of(to)?;
        // SAFETY: as in `read`, the other way round.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), start, from.len()) };
        Ok(())
    }

    fn contents(&mut self, buffer: Buffer) -> Result<&mut [u8]> {
        let bytes = self.buffers.get(&buffer.0).map_or(0, |buffer| buffer.length());
        let start = self.start_of(Slice { buffer, offset: 0, bytes })?;
        // SAFETY: the bytes are there as long as the buffer, which `&mut self` keeps; every value is a valid byte, and no commit that
        // was not waited for uses the buffer.
        Ok(unsafe { std::slice::from_raw_parts_mut(start, bytes) })
    }

    fn copy(&mut self, from: Slice, to: Slice) -> Result<()> {
        assert_eq!(from.bytes, to.bytes);
        let (source, target) = (self.start_of(from)?, self.start_of(to)?);
        // SAFETY: both are there, and no commit that was not waited for uses them; `ptr::copy` allows overlap.
        unsafe { std::ptr::copy(source, target, from.bytes) };
        Ok(())
    }

    fn clear(&mut self, slice: Slice) -> Result<()> {
        let start = self.start_of(slice)?;
        // SAFETY: as in `write`.
        unsafe { std::ptr::write_bytes(start, 0, slice.bytes) };
        Ok(())
    }

    fn commit(&mut self, commands: Vec<Command>) -> Result<Commit> {
        autoreleasepool(|_| {
            let buffer = self.queue.commandBuffer().ok_or_else(|| device_error("no command buffer"))?;
            let encoder = buffer.computeCommandEncoderWithDispatchType(MTLDispatchType::Concurrent);
            let encoder = encoder.ok_or_else(|| device_error("no command encoder"))?;
            let encoded = commands.iter().try_for_each(|command| match command {
                Command::Dispatch(dispatch) => self.encode(&encoder, dispatch),
                Command::Barrier => {
                    encoder.memoryBarrierWithScope(MTLBarrierScope::Buffers);
                    Ok(())
                }
            });
            // An encoder has to be ended before it goes, also after an error.
            encoder.endEncoding();
            encoded?;
            buffer.commit();
            let commit = Commit(self.next_commit);
            self.next_commit += 1;
            self.commits.push_back((commit, buffer));
            Ok(commit)
        })
    }

    fn wait(&mut self, commit: Commit) -> Result<()> {
        let mut result = Ok(());
        while self.commits.front().is_some_and(|(first, _)| *first <= commit) {
            let Some((_, buffer)) = self.commits.pop_front() else { break };
            let ended = autoreleasepool(|_| {
                buffer.waitUntilCompleted();
                match buffer.status() {
                    MTLCommandBufferStatus::Completed => Ok(()),
                    status => Err(match buffer.error() {
                        Some(error) => room::failure(error.code(), &words_of(&error)),
                        None => room::failure(0, &format!("status {status:?}")),
                    }),
                }
            });
            // What comes after a failed one computes on what it left behind: the first error is the one that tells.
            result = result.and(ended);
        }
        result
    }
}

impl Drop for MacGpu {
    /// Mapped files may go only when the GPU is done with them.
    fn drop(&mut self) {
        for (_, buffer) in self.commits.drain(..) {
            buffer.waitUntilCompleted();
        }
    }
}
