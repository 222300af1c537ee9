//! A body of a request, for the parser of each API: no panic, and a conversation that is taken is in the template's shape.

#![no_main]

use libfuzzer_sys::fuzz_target;
use lily_model::chat::normalize_messages;
use lily_server::api::openai::{chat, completions, responses};
use lily_server::api::{anthropic, tokens};
use lily_server::turn::Input;

fuzz_target!(|input: &[u8]| {
    let Ok(body) = serde_json::from_slice(input) else { return };
    let _ = completions::parse(&body);
    let _ = tokens::parse(&body);
    let requests = [
        chat::parse(&body).map(|(request, _)| request),
        responses::parse(&body).map(|(request, _)| request),
        anthropic::parse(&body).map(|(request, _)| request),
    ];
    for request in requests.into_iter().flatten() {
        if let Input::Chat(chat) = request.input {
            assert!(normalize_messages(&chat.messages).is_ok(), "{}", chat.messages);
        }
    }
});
