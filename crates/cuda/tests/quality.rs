//! The trained demo checkpoint on the GPU against the reference: held-out text, by the chunk and token by token.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use lily_backend::{Backend, Input, Row, RowOutput, Step, Want};
use lily_cuda::{CudaBackend, LoadOptions};
use lily_model::Checkpoint;
use lily_model::tokenizer::Tokenizer;
use lily_reference::quality::{Agreement, Likelihood};
use lily_reference::{Logits, Reference};

/// Tokens that suffice for the shares below to mean something, and that the reference gets through in a minute.
const TOKENS: usize = 6000;
/// Most tokens of a document.
const DOCUMENT: usize = 1024;
/// Largest relative difference of the perplexities: the share of the budget that a BF16 cache and 16-bit inputs of linears have.
const PERPLEXITY: f64 = 4e-4;
/// Smallest share of equal most likely tokens.
const TOP: f64 = 0.99;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Documents of both held-out sets in turn, until there are enough tokens.
fn documents() -> Vec<Vec<u32>> {
    let json = std::fs::read(root().join("assets/demo/tokenizer.json")).expect("the demo tokenizer");
    let tokenizer = Tokenizer::from_json(&json, None).expect("a tokenizer");
    let set = |name: &str| {
        let text = std::fs::read_to_string(root().join("tools/train-demo/heldout").join(name)).expect("held-out text");
        let end = "<|endoftext|>";
        text.split(&format!("{end}\n")).filter(|d| !d.is_empty()).map(|d| format!("{d}{end}")).collect::<Vec<_>>()
    };
    let (synthetic, kjv) = (set("synthetic.txt"), set("kjv.txt"));
    let mut taken = 0;
    let both = synthetic.iter().zip(&kjv).flat_map(|(a, b)| [a, b]);
    let ids = both.map(|text| {
        let mut ids = tokenizer.encode_stock(text).expect("encoded");
        ids.truncate(DOCUMENT);
        ids
    });
    ids.filter(|ids| ids.len() > 1)
        .take_while(|ids| {
            let enough = taken >= TOKENS;
            taken += ids.len();
            !enough
        })
        .collect()
}

/// The reference's logits of each document.
fn expected(checkpoint: &Checkpoint, documents: &[Vec<u32>]) -> Vec<Vec<f32>> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let next = std::sync::atomic::AtomicUsize::new(0);
    let mut all: Vec<(usize, Vec<f32>)> = std::thread::scope(|scope| {
        let work = || {
            let reference = Reference::new(checkpoint);
            let mut own = Vec::new();
            loop {
                let index = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                let Some(ids) = documents.get(index) else { return own };
                own.push((index, reference.forward(&mut reference.new_state(), ids, Logits::All)));
            }
        };
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("logits")).collect()
    });
    all.sort_by_key(|(index, _)| *index);
    all.into_iter().map(|(_, logits)| logits).collect()
}

#[test]
#[ignore = "needs an NVIDIA GPU, and a minute of the reference on 16 cores"]
fn held_out_text_is_as_likely_as_the_reference_says() {
    let checkpoint = Arc::new(Checkpoint::open(root().join("assets/demo")).expect("the demo checkpoint"));
    let vocab = checkpoint.config.shape.vocab;
    let documents = documents();
    let expected = expected(&checkpoint, &documents);
    let options = LoadOptions { max_context: Some(DOCUMENT), max_chunk: Some(512), ..LoadOptions::default() };
    let mut backend = CudaBackend::load(Arc::clone(&checkpoint), &options).expect("loaded");
    for chunk in [512, 1] {
        let (mut likelihood, mut of_reference) = (Likelihood::default(), Likelihood::default());
        let mut agreement = Agreement::default();
        for (ids, expected) in documents.iter().zip(&expected) {
            let state = backend.new_state(ids.len()).expect("a state");
            let mut logits = Vec::new();
            for ids in ids.chunks(chunk) {
                let rows = vec![Row { state, input: Input::Tokens(ids.to_vec()), want: Want::AllLogits }];
                let ticket = backend.submit(Step { rows, trace: false }).expect("accepted");
                let RowOutput::Logits(part) = backend.wait(ticket).expect("an output").rows.remove(0) else {
                    panic!("logits were wanted");
                };
                logits.extend(part);
            }
            backend.free_state(state).expect("freed");
            assert_eq!(logits.len(), expected.len());
            let rows = logits.chunks_exact(vocab).zip(expected.chunks_exact(vocab));
            for ((row, expected), next) in rows.zip(&ids[1..]) {
                likelihood.add(row, *next);
                of_reference.add(expected, *next);
                agreement.add(expected, row);
            }
        }
        let (a, b, same) = (likelihood.perplexity(), of_reference.perplexity(), agreement.same_top_share());
        println!(
            "{} tokens in chunks of {chunk}: perplexity {a:.5}, of the reference {b:.5}, {:+.4} %; top-1 the same {:.2} %",
            likelihood.tokens,
            (a / b - 1.0) * 100.0,
            same * 100.0
        );
        assert!((a / b - 1.0).abs() < PERPLEXITY, "chunks of {chunk}: perplexity {a}, of the reference {b}");
        assert!(same >= TOP, "chunks of {chunk}: {same} of the most likely tokens are the same");
    }
}
