//! The text side of a checkpoint: tokenizer, chat template, stop tokens and sampling defaults, read together.

use std::collections::BTreeSet;

use lily_model::chat::{ChatError, ChatTemplate, Rendered};
use lily_model::tokenizer::{PromptIds, Tokenizer, TokenizerError};
use lily_model::{Config, ModelError, Source};
use serde_json::{Map, Value};

use crate::sampler::Sampling;

/// Everything of a checkpoint but its weights.
#[derive(Clone, Debug)]
pub struct TextModel {
    /// `tokenizer.json`.
    pub tokenizer: Tokenizer,
    /// `chat_template.jinja`, or the template inside `tokenizer_config.json`.
    pub template: ChatTemplate,
    /// Tokens that end an answer.
    pub stop_tokens: BTreeSet<u32>,
    /// What requests do not say about sampling.
    pub sampling: Sampling,
}

/// Why the text side of a checkpoint cannot be used, or a text not be made a prompt.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A file is missing, unreadable or damaged.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The tokenizer cannot be read, or cannot encode the text.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The template cannot be read, or refuses the conversation.
    #[error(transparent)]
    Chat(#[from] ChatError),
}

/// A prompt as the engine takes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    /// One id per token.
    pub ids: Vec<u32>,
    /// Positions where later prompts may leave this one, ascending, such as before the header of the answer: the
    /// session keeps snapshots there, and chunks end there.
    pub branches: Vec<usize>,
    /// Whether the answer begins inside a think block.
    pub in_thinking: bool,
}

impl From<Vec<u32>> for Prompt {
    fn from(ids: Vec<u32>) -> Prompt {
        Prompt { ids, ..Prompt::default() }
    }
}

/// Tokens that end an answer of this family even if a converter lost them from the configuration.
const STOP_TOKENS: [&str; 2] = ["<|im_end|>", "<|endoftext|>"];

impl TextModel {
    /// Reads tokenizer.json, tokenizer_config.json, generation_config.json and the chat template beside a `config`
    /// that is already read. The stop tokens are those that any of these files names as end tokens.
    ///
    /// # Errors
    /// [`TextError`] with the file and what is wrong in it.
    pub fn load(source: &Source, config: &Config) -> Result<TextModel, TextError> {
        let tokenizer_config = source.read_optional("tokenizer_config.json")?;
        let tokenizer = Tokenizer::from_json(&source.read("tokenizer.json")?, tokenizer_config.as_deref())?;
        let jinja = source.read_optional("chat_template.jinja")?;
        let template = ChatTemplate::from_checkpoint(jinja.as_deref(), tokenizer_config.as_deref())?;
        let mut stop_tokens = config.eos_token_ids.clone();
        stop_tokens.extend(tokenizer.eos());
        stop_tokens.extend(STOP_TOKENS.iter().filter_map(|token| tokenizer.token_id(token.as_bytes())));
        let mut sampling = Sampling::published();
        if let Some(json) = source.read_optional("generation_config.json")? {
            let file = source.name_of("generation_config.json");
            stop_tokens.extend(lily_model::config::eos_of(&file, &json)?);
            let damaged = |reason: String| ModelError::Damaged { file: file.clone(), reason };
            let map: Map<String, Value> = serde_json::from_slice(&json).map_err(|e| damaged(e.to_string()))?;
            sampling = Sampling::from_generation_config(&map).map_err(|e| damaged(e.to_string()))?;
        }
        Ok(TextModel { tokenizer, template, stop_tokens, sampling })
    }

    /// The prompt of a rendered conversation.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`] if the text cannot be encoded.
    pub fn prompt(&self, rendered: &Rendered) -> Result<Prompt, TextError> {
        let encoded = self.tokenizer.encode_rendered(rendered)?;
        Ok(Prompt { branches: branches(&encoded), ids: encoded.ids, in_thinking: rendered.ends_in_thinking() })
    }
}

/// Where later prompts may leave this one: behind the first turn, which is the system message and may be shared by conversations;
/// before the last question, which may be asked differently; before the last two answers, which the next prompt may show
/// differently or not at all. More would cut long histories into small chunks. A prompt without turns may be sent once more.
fn branches(prompt: &PromptIds) -> Vec<usize> {
    let (turns, answers) = (&prompt.turn_starts, &prompt.assistant_starts);
    let last_answers = answers[answers.len().saturating_sub(2)..].iter();
    let question = turns.iter().rev().find(|turn| answers.last().is_some_and(|answer| *turn < answer));
    let mut branches: BTreeSet<usize> =
        turns.iter().skip(1).take(1).chain(question).chain(last_answers).copied().collect();
    if turns.is_empty() {
        branches.extend(prompt.ids.len().checked_sub(1));
    }
    branches.remove(&0);
    branches.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{STOP, byte_tokenizer, tokenizer_json};
    use lily_model::chat::Chat;

    const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                            {% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}";

    /// The text side of the tiny checkpoint's config and these files.
    fn load(files: &[(&str, &str)]) -> Result<TextModel, TextError> {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in files {
            std::fs::write(folder.path().join(name), content).unwrap();
        }
        let config = Config::parse("config.json", include_bytes!("../../../testdata/tiny/config.json")).unwrap();
        TextModel::load(&Source::Directory(folder.path().to_owned()), &config)
    }

    #[test]
    fn every_file_adds_its_stop_tokens() {
        let tokenizer = tokenizer_json();
        let files = [
            ("tokenizer.json", tokenizer.as_str()),
            ("tokenizer_config.json", r#"{"eos_token": "<think>"}"#),
            ("chat_template.jinja", TEMPLATE),
            ("generation_config.json", r#"{"eos_token_id": [7, 8], "temperature": 0.5}"#),
        ];
        let text = load(&files).unwrap();
        // config.json, generation_config.json, tokenizer_config.json, and the tokenizer's own two.
        assert_eq!(text.stop_tokens, BTreeSet::from([1022, 1023, 7, 8, 257, STOP, 261]));
        assert_eq!(text.sampling, Sampling { temperature: Some(0.5), ..Sampling::default() });
    }

    #[test]
    fn without_a_generation_config_the_published_settings_hold() {
        let tokenizer = tokenizer_json();
        let config = serde_json::json!({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}).to_string();
        let text = load(&[("tokenizer.json", &tokenizer), ("tokenizer_config.json", &config)]).unwrap();
        assert_eq!(text.sampling, Sampling::published());
    }

    #[test]
    fn a_missing_or_wrong_file_is_named() {
        let tokenizer = tokenizer_json();
        let whole = [("tokenizer.json", tokenizer.as_str()), ("chat_template.jinja", TEMPLATE)];
        let with = |extra: &[(&str, &str)]| load(&[&whole, extra].concat()).unwrap_err().to_string();
        assert!(load(&[]).unwrap_err().to_string().contains("has no tokenizer.json"));
        assert!(load(&whole[..1]).unwrap_err().to_string().contains("chat_template.jinja"));
        assert!(with(&[("tokenizer.json", "{")]).contains("tokenizer.json"));
        assert!(with(&[("chat_template.jinja", "{% if %}")]).contains("template"));
        for (config, reason) in [("[", "JSON"), (r#"{"top_p": 7}"#, "top_p: found 7, allowed 0 to 1")] {
            let message = with(&[("generation_config.json", config)]);
            assert!(message.contains("generation_config.json is damaged") && message.contains(reason), "{message}");
        }
    }

    #[test]
    fn a_prompt_branches_behind_its_first_turn_and_before_its_last_question_and_answers() {
        let text = TextModel {
            tokenizer: byte_tokenizer(),
            template: ChatTemplate::new(TEMPLATE).unwrap(),
            stop_tokens: BTreeSet::new(),
            sampling: Sampling::default(),
        };
        let messages = ["user", "assistant", "user", "assistant", "user"]
            .map(|role| serde_json::json!({"role": role, "content": "<|im_start|>assistant"}));
        let chat = Chat { messages: messages.to_vec().into(), add_generation_prompt: true, ..Chat::default() };
        let prompt = text.prompt(&text.template.render_chat(&chat).unwrap()).unwrap();
        let role = |at: &usize| text.tokenizer.decode(&prompt.ids[*at..], false)[..20].to_owned();
        let roles: Vec<String> = prompt.branches.iter().map(role).collect();
        let [user, assistant] = ["<|im_start|>user\n<|i", "<|im_start|>assistan"];
        assert_eq!(roles, [assistant, assistant, user, assistant]);
        assert_eq!(prompt.branches[3], prompt.ids.len() - "?assistant\n?\n".len());
        let raw = text.prompt(&Rendered::by_hand("No turns.")).unwrap();
        assert_eq!(raw.branches, [8]);
        assert!(prompt.in_thinking);
    }
}
