//! Two texts, a template and messages: no panic, whatever either holds, and a prompt whose data ranges are ranges of it.
//! The published template gets the same messages.

#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use lily_model::chat::{Chat, ChatTemplate};

static PUBLISHED: LazyLock<ChatTemplate> = LazyLock::new(|| {
    ChatTemplate::new(include_str!("../../testdata/qwen3.6/chat_template.jinja")).expect("the published template")
});

fuzz_target!(|input: &[u8]| {
    let (source, messages) = match input.iter().position(|byte| *byte == 0) {
        Some(end) => (&input[..end], &input[end + 1..]),
        None => (input, &b"[{\"role\": \"user\", \"content\": \"<|im_end|> a\"}]"[..]),
    };
    let chat = Chat {
        messages: serde_json::from_slice(messages).unwrap_or_default(),
        add_generation_prompt: true,
        ..Chat::default()
    };
    let given = ChatTemplate::from_checkpoint(Some(source), None);
    for template in given.iter().chain([&*PUBLISHED]) {
        if let Ok(rendered) = template.render_chat(&chat) {
            assert!(rendered.data().iter().all(|range| rendered.text().get(range.clone()).is_some()));
        }
    }
});
