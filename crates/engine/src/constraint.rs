//! What limits the tokens of an answer while it is generated.

/// Says which tokens may come next. It is asked after the step that computes their logits was submitted, so that its work
/// overlaps with the device's.
pub trait Constraint: Send {
    /// Whether the next token is limited. If not, [`Constraint::mask`] is not asked for it.
    fn is_active(&self) -> bool;

    /// The tokens that may come next: bit `id % 32` of word `id / 32`.
    ///
    /// # Errors
    /// In words, if it cannot say; the answer then fails.
    fn mask(&mut self) -> Result<Vec<u32>, String>;

    /// Takes the token that came, limited or not.
    ///
    /// # Errors
    /// In words, if it cannot go on; the answer then fails.
    fn advance(&mut self, token: u32) -> Result<(), String>;
}
