//! The trained demo checkpoint on the GPU against the reference: held-out text, by the chunk and token by token.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use lily_backend::{Backend, Input, Row, RowOutput, Step, Want};
use lily_cuda::{CudaBackend, LoadOptions};
use lily_model::Checkpoint;
use lily_model::tokenizer::Tokenizer;
use lily_reference::ops;
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

/// Of every predicted token its log-probability and the most likely one.
fn score(logits: &[f32], ids: &[u32], vocab: usize) -> Vec<(f64, usize)> {
    let rows = logits.chunks_exact(vocab).zip(&ids[1..]);
    rows.map(|(row, next)| {
        let highest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|x| f64::from(x - highest).exp()).sum();
        (f64::from(row[*next as usize] - highest) - sum.ln(), ops::greedy(row))
    })
    .collect()
}

fn perplexity(scores: &[(f64, usize)]) -> f64 {
    (-scores.iter().map(|s| s.0).sum::<f64>() / scores.len() as f64).exp()
}

fn expected(checkpoint: &Checkpoint, documents: &[Vec<u32>]) -> Vec<(f64, usize)> {
    let vocab = checkpoint.config.shape.vocab;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let next = std::sync::atomic::AtomicUsize::new(0);
    let mut scored: Vec<(usize, Vec<(f64, usize)>)> = std::thread::scope(|scope| {
        let work = || {
            let reference = Reference::new(checkpoint);
            let mut own = Vec::new();
            loop {
                let index = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                let Some(ids) = documents.get(index) else { return own };
                let logits = reference.forward(&mut reference.new_state(), ids, Logits::All);
                own.push((index, score(&logits, ids, vocab)));
            }
        };
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("scored")).collect()
    });
    scored.sort_by_key(|(index, _)| *index);
    scored.into_iter().flat_map(|(_, scores)| scores).collect()
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
        let mut got = Vec::new();
        for ids in &documents {
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
            got.extend(score(&logits, ids, vocab));
        }
        assert_eq!(got.len(), expected.len());
        let (a, b) = (perplexity(&got), perplexity(&expected));
        let same = got.iter().zip(&expected).filter(|(a, b)| a.1 == b.1).count() as f64 / got.len() as f64;
        println!(
            "{} tokens in chunks of {chunk}: perplexity {a:.5}, of the reference {b:.5}, {:+.4} %; top-1 the same {:.2} %",
            got.len(),
            (a / b - 1.0) * 100.0,
            same * 100.0
        );
        assert!((a / b - 1.0).abs() < PERPLEXITY, "chunks of {chunk}: perplexity {a}, of the reference {b}");
        assert!(same >= TOP, "chunks of {chunk}: {same} of the most likely tokens are the same");
    }
}
