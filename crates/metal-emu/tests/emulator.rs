//! Every fault that the emulator knows, made on purpose; and that the language means here what MSL says.

use lily_metal_emu::{Bound, Command, Dispatch, Emulator, Error, Language, LibraryId, PipelineId, Result, Slice};

/// A seed for each way of ordering work.
const ORDERS: [u32; 3] = [0, 1, 7];

const FAULTS: &str = include_str!("kernels/faults.metal");
const COPY: &str = "#include <metal_stdlib>
using namespace metal;
kernel void copy_values(device const float* from [[buffer(0)]], device float* to [[buffer(1)]],
                        uint i [[thread_position_in_grid]]) {
  to[i] = from[i];
}
";
const LANGUAGE: &str = include_str!("kernels/language.metal");
const TENSORS: &str = include_str!("kernels/tensors.metal");

struct Device {
    emulator: Emulator,
    library: LibraryId,
}

impl Device {
    fn new(order: u32, source: &str) -> Device {
        let mut emulator = Emulator::new(order).expect("it works");
        let language = if source == TENSORS { Language::Metal4_0 } else { Language::Metal3_2 };
        let library = emulator.library("test.metal", source, language).expect("it works");
        Device { emulator, library }
    }

    fn pipeline(&mut self, kernel: &str) -> PipelineId {
        self.emulator.pipeline(self.library, kernel, &[]).expect("it works")
    }

    fn floats(&mut self, values: &[f32]) -> Slice {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let buffer = self.emulator.buffer(bytes.len(), false).expect("it works");
        let slice = Slice { buffer, offset: 0, bytes: bytes.len() };
        self.emulator.write(slice).expect("it works").copy_from_slice(&bytes);
        slice
    }

    fn halves(&mut self, bits: &[u16]) -> Slice {
        let slice = self.floats(&vec![0.0; bits.len() / 2]);
        let bytes: Vec<u8> = bits.iter().flat_map(|half| half.to_le_bytes()).collect();
        self.emulator.write(slice).expect("it works").copy_from_slice(&bytes);
        slice
    }

    fn read(&self, slice: Slice) -> Vec<f32> {
        let bytes = self.emulator.read(slice).expect("it works");
        bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect()
    }

    fn run(&mut self, commands: Vec<Command>) -> Result<()> {
        let commit = self.emulator.commit(commands)?;
        self.emulator.wait(commit)
    }
}

fn dispatch(pipeline: PipelineId, bindings: Vec<(usize, Bound)>, groups: u32, threads: u32) -> Dispatch {
    Dispatch { pipeline, bindings, threadgroup: Vec::new(), groups: [groups, 1, 1], threads: [threads, 1, 1] }
}

fn number(n: u32) -> Bound {
    Bound::Bytes(n.to_le_bytes().to_vec())
}

/// What `kernel` is stopped for, in each order; `y` has room for 64 values and is bound for writing at slot 0.
fn faults(kernel: &str, more: &[(usize, Bound)], groups: u32, threads: u32) -> Vec<String> {
    faults_of(FAULTS, kernel, more, groups, threads)
}

fn faults_of(file: &str, kernel: &str, more: &[(usize, Bound)], groups: u32, threads: u32) -> Vec<String> {
    let fault = |order| {
        let mut device = Device::new(order, file);
        let pipeline = device.pipeline(kernel);
        let y = device.floats(&[0.0; 64]);
        let mut bindings = vec![(0, Bound::Write(y))];
        bindings.extend(more.iter().cloned());
        match device.run(vec![Command::Dispatch(dispatch(pipeline, bindings, groups, threads))]) {
            Err(Error::Fault { message, .. }) => message,
            other => panic!("{kernel} in order {order}: {other:?}"),
        }
    };
    ORDERS.iter().map(|order| fault(*order)).collect()
}

fn assert_each_has(messages: &[String], what: &str) {
    assert!(messages.iter().all(|message| message.contains(what)), "{what}: {messages:?}");
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn a_sound_kernel_gives_the_same_bits_in_every_order() {
    let n = 100u32;
    let values: Vec<f32> = (0..n * 5).map(|i| (i as f32 * 0.7).sin()).collect();
    let results = ORDERS.map(|order| {
        let mut device = Device::new(order, FAULTS);
        let pipeline = device.pipeline("sum");
        let (x, y) = (device.floats(&values), device.floats(&[0.0; 5]));
        let bindings = vec![(0, Bound::Read(x)), (1, Bound::Write(y)), (2, number(n))];
        device.run(vec![Command::Dispatch(dispatch(pipeline, bindings, 5, 96))]).unwrap();
        device.read(y)
    });
    for (group, sum) in results[0].iter().enumerate() {
        let expected: f64 = values[group * 100..][..100].iter().map(|x| f64::from(*x)).sum();
        assert!((f64::from(*sum) - expected).abs() < 1e-5, "{sum} and {expected}");
    }
    assert_eq!(results[0], results[1]);
    assert_eq!(results[0], results[2]);
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn a_missing_barrier_is_a_fault_in_every_order() {
    let fault = |order| {
        let mut device = Device::new(order, FAULTS);
        let pipeline = device.pipeline("sum_without_barrier");
        let (x, y) = (device.floats(&[1.0; 96]), device.floats(&[0.0]));
        let bindings = vec![(0, Bound::Read(x)), (1, Bound::Write(y))];
        let error = device.run(vec![Command::Dispatch(dispatch(pipeline, bindings, 1, 96))]).unwrap_err();
        error.to_string()
    };
    assert_each_has(&ORDERS.map(fault), "race: another simdgroup");
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn unwritten_memory_is_nan() {
    let mut device = Device::new(0, FAULTS);
    let pipeline = device.pipeline("reads_unwritten_threadgroup_memory");
    let y = device.floats(&[0.0; 32]);
    device.run(vec![Command::Dispatch(dispatch(pipeline, vec![(0, Bound::Write(y))], 1, 32))]).unwrap();
    assert!(device.read(y).iter().all(|x| x.is_nan()));
    let buffer = device.emulator.buffer(64, false).unwrap();
    assert!(device.read(Slice { buffer, offset: 0, bytes: 64 }).iter().all(|x| x.is_nan()));
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn lanes_that_part_are_faults() {
    assert_each_has(&faults("divergent_simd_calls", &[], 1, 32), "meet at different simd calls (line 3");
    for message in faults("one_side_of_a_branch_calls", &[], 1, 32) {
        let either = ["a lane returned while others", "after a lane of the simdgroup has returned"];
        assert!(either.iter().any(|what| message.contains(what)), "{message}");
    }
    assert_each_has(&faults("shuffle_from_beyond", &[], 1, 32), "inactive or out-of-range lane (line 5");
    for message in faults("return_before_a_barrier", &[], 1, 64) {
        assert!(message.contains("a thread returned") || message.contains("after a thread has returned"), "{message}");
    }
    assert_each_has(&faults("different_barriers", &[], 1, 64), "meet at different barriers");
}

/// A matrix needs all lanes; and it has what other lanes write only if they were waited for.
#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn matrices_take_a_whole_simdgroup_and_do_not_wait_for_it() {
    let mut device = Device::new(1, FAULTS);
    let y = device.floats(&[0.0; 64]);
    let mut run = |kernel: &str| {
        let pipeline = device.pipeline(kernel);
        device.run(vec![Command::Dispatch(dispatch(pipeline, vec![(0, Bound::Write(y))], 1, 32))])
    };
    run("matrix_of_what_was_not_waited_for").unwrap();
    let parted = run("matrix_of_a_part_of_the_lanes").unwrap_err().to_string();
    assert!(parted.contains("without all 32 lanes") || parted.contains("has returned"), "{parted}");
    assert!(device.read(y).iter().any(|x| x.is_nan()), "every lane saw what the others wrote");
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn accesses_outside_of_what_is_bound_are_faults() {
    assert_each_has(
        &faults("write_at", &[(1, number(64))], 1, 32),
        "outside of every bound buffer: 4 bytes at offset 256",
    );
    assert_each_has(&faults("write_at", &[(1, number(u32::MAX))], 1, 32), "outside of every bound buffer");
    assert_each_has(&faults("too_much_threadgroup_memory", &[], 1, 32), "more than 32768 bytes");
    let mut device = Device::new(0, FAULTS);
    let (x, y) = (device.floats(&[1.0; 8]), device.floats(&[0.0; 4]));
    let half = Slice { bytes: 16, ..x };
    let mut run = |kernel: &str, x: Slice, at| {
        let pipeline = device.pipeline(kernel);
        let bindings = vec![(0, Bound::Read(x)), (1, number(at)), (2, Bound::Write(y))];
        device.run(vec![Command::Dispatch(dispatch(pipeline, bindings, 1, 32))])
    };
    run("read_at", half, 3).unwrap();
    let outside = run("read_at", half, 4).unwrap_err().to_string();
    assert!(outside.contains("4 bytes at offset 16 of the 16 bound at slot 0"), "{outside}");
    run("read_four_at", x, 4).unwrap();
    let misaligned = run("read_four_at", x, 1).unwrap_err().to_string();
    assert!(misaligned.contains("misaligned access: 16 bytes at offset 4"), "{misaligned}");
    let pipeline = device.pipeline("write_through_a_cast");
    let command = Command::Dispatch(dispatch(pipeline, vec![(0, Bound::Read(x))], 1, 32));
    let written = device.run(vec![command]).unwrap_err().to_string();
    assert!(written.contains("bound for reading"), "{written}");
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn races_between_threadgroups_and_dispatches_are_faults_in_every_order() {
    assert_each_has(&faults("groups_write_one_place", &[], 2, 32), "another threadgroup of the same dispatch writes");
    assert_each_has(&faults("groups_read_what_others_write", &[], 2, 32), "another threadgroup of the same dispatch");
    for order in ORDERS {
        let mut device = Device::new(order, FAULTS);
        let (write, read) = (device.pipeline("write_at"), device.pipeline("read_at"));
        let (x, y) = (device.floats(&[0.0; 4]), device.floats(&[0.0; 4]));
        let write = |at| Command::Dispatch(dispatch(write, vec![(0, Bound::Write(x)), (1, number(at))], 1, 32));
        let read = |at| {
            let bindings = vec![(0, Bound::Read(x)), (1, number(at)), (2, Bound::Write(y))];
            Command::Dispatch(dispatch(read, bindings, 1, 32))
        };
        device.run(vec![write(2), Command::Barrier, read(2)]).unwrap();
        assert_eq!(device.read(y)[0], 1.0);
        device.run(vec![write(2), read(3)]).unwrap();
        for commands in [vec![write(2), read(2)], vec![read(2), write(2)], vec![write(1), write(1)]] {
            let race = device.run(commands).unwrap_err().to_string();
            assert!(race.contains("a dispatch that no barrier separates"), "{race}");
        }
    }
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn bindings_are_held_against_the_table_of_the_kernel() {
    let mut device = Device::new(0, FAULTS);
    let pipeline = device.pipeline("read_at");
    let (x, y) = (device.floats(&[0.0; 8]), device.floats(&[0.0; 8]));
    let sound = || vec![(0, Bound::Read(x)), (1, number(1)), (2, Bound::Write(y))];
    let mut refusal = |bindings: Vec<(usize, Bound)>, groups: u32, threads: u32| match device
        .emulator
        .commit(vec![Command::Dispatch(dispatch(pipeline, bindings, groups, threads))])
    {
        Err(error @ Error::Encoding(_)) => error.to_string(),
        other => panic!("{other:?}"),
    };
    let with = |index: usize, binding: (usize, Bound)| {
        let mut bindings = sound();
        bindings[index] = binding;
        bindings
    };
    for (bindings, groups, threads, what) in [
        (sound()[..2].to_vec(), 1, 32, "slot 2 is not bound once"),
        ([sound(), sound()].concat(), 1, 32, "slot 0 is not bound once"),
        ([sound(), vec![(3, number(0))]].concat(), 1, 32, "no buffer at slot 3"),
        (with(0, (0, Bound::Write(x))), 1, 32, "slot 0 only reads"),
        (with(2, (2, Bound::Read(y))), 1, 32, "slot 2 writes"),
        (with(1, (1, Bound::Bytes(vec![0; 8]))), 1, 32, "slot 1 has 8 bytes for elements of 4"),
        (with(0, (0, Bound::Read(Slice { bytes: 6, ..x }))), 1, 32, "slot 0 has 6 bytes"),
        (with(0, (0, Bound::Read(Slice { offset: 2, bytes: 8, ..x }))), 1, 32, "begins at offset 2"),
        (with(0, (0, Bound::Read(Slice { offset: 16, ..x }))), 1, 32, "bytes 16 to 48 of a buffer of 32"),
        (sound(), 0, 32, "a grid of"),
        (sound(), 1, 0, "threadgroups of 0 threads"),
        (sound(), 1, 1025, "threadgroups of 1025 threads"),
    ] {
        let refusal = refusal(bindings, groups, threads);
        assert!(refusal.contains(what), "{what}: {refusal}");
    }
    let limited = device.pipeline("at_most_64_threads");
    let command = |threads| vec![Command::Dispatch(dispatch(limited, vec![(0, Bound::Write(y))], 1, threads))];
    assert!(device.emulator.commit(command(65)).unwrap_err().to_string().contains("1 to 64"));
    assert!(device.emulator.pipeline(device.library, "absent", &[]).is_err());
    assert!(device.emulator.pipeline(device.library, "sum", &[("ABSENT", 1)]).is_err());
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn work_is_done_late_and_the_host_keeps_off_until_then() {
    let mut device = Device::new(0, FAULTS);
    let pipeline = device.pipeline("read_at");
    let (x, y) = (device.floats(&[3.0; 8]), device.floats(&[0.0; 8]));
    let bindings = vec![(0, Bound::Read(x)), (1, number(1)), (2, Bound::Write(y))];
    let commit = device.emulator.commit(vec![Command::Dispatch(dispatch(pipeline, bindings, 1, 32))]).unwrap();
    assert!(device.emulator.read(x).is_ok(), "both only read");
    assert!(matches!(device.emulator.write(x), Err(Error::HostRace { .. })));
    assert!(matches!(device.emulator.read(y), Err(Error::HostRace { .. })));
    assert!(matches!(device.emulator.free(x.buffer), Err(Error::HostRace { .. })));
    device.emulator.wait(commit).unwrap();
    assert_eq!(device.read(y)[0], 3.0);
    device.emulator.free(x.buffer).unwrap();
    assert!(device.emulator.read(x).is_err());
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn each_address_is_counted_once_per_dispatch() {
    let mut device = Device::new(0, FAULTS);
    let pipeline = device.pipeline("sum");
    let (x, y) = (device.floats(&[1.0; 40]), device.floats(&[0.0; 2]));
    // Two sums of 20 values; every thread reads n.
    let bindings = || vec![(0, Bound::Read(x)), (1, Bound::Write(y)), (2, number(20))];
    let command = || Command::Dispatch(dispatch(pipeline, bindings(), 2, 64));
    device.run(vec![command(), Command::Barrier, command()]).unwrap();
    for moved in device.emulator.take_moved() {
        let counts: Vec<(usize, u64, u64)> =
            moved.slots.iter().map(|(slot, _, read, written)| (*slot, *read, *written)).collect();
        assert_eq!((moved.kernel.as_str(), counts), ("sum", vec![(0, 160, 0), (1, 0, 8), (2, 4, 0)]));
    }
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn vectors_convert_and_compute_as_msl_says() {
    let mut device = Device::new(7, LANGUAGE);
    let pipeline = device.emulator.pipeline(device.library, "vectors", &[("SCALE", 10)]).unwrap();
    let missing = device.emulator.pipeline(device.library, "vectors", &[]);
    assert!(missing.is_err_and(|e| e.to_string().contains("SCALE has no value")));
    let y = device.floats(&[0.0; 12]);
    // float2 x, uint n, 4 bytes of padding
    let pair: Vec<u8> = [2f32.to_bits(), 3f32.to_bits(), 1, 0].iter().flat_map(|x| x.to_le_bytes()).collect();
    let bindings = vec![(0, Bound::Bytes(pair)), (1, Bound::Write(y))];
    device.run(vec![Command::Dispatch(dispatch(pipeline, bindings, 1, 32))]).unwrap();
    let tenth_in_half = 0.099_975_586;
    let expected = [5.0, 20.0, tenth_in_half, 2.0, 3.0, 1029.0, 15.0, 3.0, 2048.0, 1.0 + 1f32.exp(), 3.0, 5.0];
    for (i, (got, expected)) in device.read(y).iter().zip(expected).enumerate() {
        assert!((got - expected).abs() < 1e-6, "{i}: {got} and {expected}");
    }
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn simd_functions_move_values_between_lanes() {
    let mut device = Device::new(7, LANGUAGE);
    let pipeline = device.emulator.pipeline(device.library, "lanes", &[("SCALE", 1)]).unwrap();
    let y = device.floats(&[0.0; 256]);
    device.run(vec![Command::Dispatch(dispatch(pipeline, vec![(0, Bound::Write(y))], 1, 32))]).unwrap();
    for (lane, got) in device.read(y).chunks_exact(8).enumerate() {
        let next = (lane + 1).min(31) as f32;
        let opposite = 2.0 * (31 - lane) as f32;
        assert_eq!(got, [496.0, 31.0, (lane ^ 5) as f32, next, 9.0, lane as f32, 1.0, opposite], "lane {lane}");
    }
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn matrices_multiply_and_threadgroup_memory_comes_from_the_encoder() {
    let mut device = Device::new(7, LANGUAGE);
    let pipeline = device.emulator.pipeline(device.library, "matrices", &[("SCALE", 1)]).unwrap();
    let a: Vec<f32> = (0..64).map(|i| (i * 7 % 11) as f32 - 5.0).collect();
    // 1024 + code is a half whose bits are easily made.
    let b: Vec<u16> = (0..64u16).map(|i| 0x6400 | (i * 5 % 13)).collect();
    let (x, c) = (device.floats(&a), device.floats(&[0.25; 64]));
    let w = device.halves(&b);
    let bindings = vec![(0, Bound::Read(x)), (1, Bound::Read(w)), (2, Bound::Write(c))];
    let mut command = dispatch(pipeline, bindings, 1, 32);
    let refused = device.emulator.commit(vec![Command::Dispatch(command.clone())]).unwrap_err();
    assert!(refused.to_string().contains("threadgroup slots [0] are wanted"), "{refused}");
    command.threadgroup = vec![(0, 128)];
    device.run(vec![Command::Dispatch(command)]).unwrap();
    for (i, got) in device.read(c).iter().enumerate() {
        let (row, column) = (i / 8, i % 8);
        let sum: f32 = (0..8).map(|k| a[row * 8 + k] * f32::from((b[column * 8 + k] & 0x3ff) + 1024)).sum();
        assert_eq!(*got, sum + 0.25);
    }
}

/// Run they are only where a GPU is, see tools/metal-on-nvidia.sh.
#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn files_compile_for_an_nvidia_gpu() {
    let folder = std::env::temp_dir().join(format!("metal-nvidia-{}", std::process::id()));
    for (source, language) in [(LANGUAGE, Language::Metal3_2), (TENSORS, Language::Metal4_0)] {
        lily_metal_emu::nvidia::compile(&folder, "test.metal", source, language).unwrap();
    }
    let texts: Vec<String> =
        folder.read_dir().unwrap().map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap()).collect();
    std::fs::remove_dir_all(&folder).unwrap();
    for kernel in ["vectors", "lanes", "product"] {
        let entry = format!(".entry msl_kernel_{kernel}(");
        assert!(texts.iter().any(|text| text.contains(&entry)), "{kernel}");
    }
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn tensors_multiply_whatever_lies_where() {
    // 1024 + code is a half whose bits are easily made.
    let halves = |n: u16, factor: u16| -> Vec<u16> { (0..n * 64).map(|i| 0x6400 | (i % 251 * factor % 17)).collect() };
    let (a, b) = (halves(32, 5), halves(16, 3));
    for order in ORDERS {
        let mut device = Device::new(order, TENSORS);
        let pipeline = device.pipeline("product");
        let (x, w, y) = (device.halves(&a), device.halves(&b), device.floats(&[0.0; 512]));
        let bindings = vec![(0, Bound::Read(x)), (1, Bound::Read(w)), (2, Bound::Write(y))];
        device.run(vec![Command::Dispatch(dispatch(pipeline, bindings, 1, 64))]).unwrap();
        for (i, got) in device.read(y).iter().enumerate() {
            let (row, column) = (i / 16, i % 16);
            let value = |bits: u16| f64::from((bits & 0x3ff) + 1024);
            let sum: f64 = (0..64).map(|k| value(a[row * 64 + k]) * value(b[column * 64 + k])).sum();
            // Near 1.3e8, where neighbours are 8 apart; a sum of 128 products has a few roundings.
            let expected = 2.0 * sum + row as f64;
            assert!((f64::from(*got) - expected).abs() <= 64.0, "{row}, {column}: {got} and {expected}");
        }
    }
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn tensors_are_multiplied_by_all_with_barriers_around() {
    let faults = |kernel, threads| faults_of(TENSORS, kernel, &[], 1, threads);
    assert_each_has(&faults("product_of_what_was_not_waited_for", 64), "race: another simdgroup");
    assert_each_has(&faults("operand_overwritten_at_once", 64), "race: another simdgroup");
    assert_each_has(&faults("product_by_one_simdgroup", 32), "other simdgroups than those of the threadgroup");
    assert_each_has(&faults("extents_of_another_product", 64), "extents of its descriptor");
    assert_each_has(&faults("every_element", 64), "outside of every bound buffer");
    for message in faults("product_by_one_simdgroup", 64) {
        assert!(message.contains("a thread returned") || message.contains("after a thread has returned"), "{message}");
    }
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn what_apples_compiler_would_refuse_is_refused() {
    let mut emulator = Emulator::new(0).unwrap();
    let refusal = |emulator: &mut Emulator, source: &str| {
        emulator.library("k.metal", source, Language::Metal3_2).unwrap_err().to_string()
    };
    let spaces = refusal(&mut emulator, include_str!("kernels/address_spaces.metal"));
    assert!(spaces.contains("first") && spaces.contains("4"), "{spaces}");
    let head = "#include <metal_stdlib>\nusing namespace metal;\n";
    for (source, what) in [
        ("inline uint f(uint x) { if constexpr (sizeof(uint) == 4) return x; return 0; }", "C++17 extension"),
        ("inline float f(float2 x) { return float3(x).x; }", "another length"),
        ("inline uint f(float x) { return as_type<ushort>(x); }", "different sizes"),
        ("inline float f(float x) { return unknown(x); }", "unknown"),
        ("inline float f(float* x) { return x[0]; }", "no address space"),
    ] {
        let refusal = refusal(&mut emulator, &format!("{head}{source}\n"));
        assert!(refusal.contains(what), "{what}: {refusal}");
    }
    let tensors = refusal(&mut emulator, TENSORS);
    assert!(tensors.contains("`auto` is not written in kernels"), "{tensors}");
    let head = head.to_owned()
        + "#include <metal_tensor>\n#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>\n";
    let mut refusal = |source: &str| {
        emulator.library("k.metal", &format!("{head}{source}\n"), Language::Metal4_0).unwrap_err().to_string()
    };
    let tensor = "typedef tensor<threadgroup half, dextents<int32_t, 2>, tensor_inline> Operand;\n";
    let product = "mpp::tensor_ops::matmul2d<mpp::tensor_ops::matmul2d_descriptor(16, 16, 64, false, true), execution_simdgroups<1>> p;";
    for (source, what) in [
        ("struct S { uint x; }; inline S f() { return {.x = 1}; }".to_owned(), "C++20"),
        ("inline void f(threadgroup half* x) { tensor<device half, dextents<int32_t, 2>, tensor_inline> t(x, dextents<int32_t, 2>(8, 8)); }".to_owned(), "cannot pass pointer to address space '__local'"),
        (format!("{tensor}inline void f() {{ {product} auto t = p.get_destination_cooperative_tensor<Operand, Operand, half>(); }}"), "multiplies halves into floats"),
        (format!("{tensor}inline void f() {{ {} }}", product.replace("16, 16, 64", "8, 8, 64") + " auto t = p.get_destination_cooperative_tensor<Operand, Operand, float>();"), "multiple of 16"),
    ] {
        let refusal = refusal(&source);
        assert!(refusal.contains(what), "{what}: {refusal}");
    }
}

/// A kernel reads a file where it is mapped; binding it for writing is refused, and so is writing it by the host.
#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn a_mapped_file_is_read_and_never_written() {
    let mut file = tempfile::tempfile().expect("a file");
    let values: Vec<f32> = (0..5000).map(|i| i as f32).collect();
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    std::io::Write::write_all(&mut file, &bytes).expect("written");
    let mut device = Device::new(0, COPY);
    assert!(matches!(device.emulator.map(&file, bytes.len() + 1), Err(Error::Memory { .. })));
    let buffer = device.emulator.map(&file, bytes.len()).expect("mapped");
    let pipeline = device.pipeline("copy_values");
    let (from, to) = (Slice { buffer, offset: 16, bytes: 64 * 4 }, device.floats(&[0.0; 64]));
    let run = |device: &mut Device, from: Slice, to: Slice| {
        let bindings = vec![(0, Bound::Read(from)), (1, Bound::Write(to))];
        device.run(vec![Command::Dispatch(dispatch(pipeline, bindings, 1, 64))])
    };
    run(&mut device, from, to).expect("run");
    assert_eq!(device.read(to), values[4..68]);
    let refused = |result: Result<()>| {
        let error = result.expect_err("refused");
        assert!(error.to_string().contains("is a mapped file, which nothing may write"), "{error}");
    };
    refused(run(&mut device, to, from));
    refused(device.emulator.write(from).map(|_| ()));
    refused(device.emulator.copy(to, from));
    let Err(Error::Fault { message, .. }) = run(&mut device, Slice { bytes: 63 * 4, ..from }, to) else {
        panic!("it read beyond what is bound")
    };
    assert!(message.contains("outside of every bound buffer"), "{message}");
    device.emulator.free(buffer).expect("freed");
    assert!(std::fs::read(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file))).expect("read") == bytes);
}
