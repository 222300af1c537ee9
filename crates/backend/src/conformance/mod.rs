//! What every backend is held to: [`laws`] on the whole, stamped for a backend by
//! [`conformance_suite!`](crate::conformance_suite), and [`cases`] for its kernels, which a device crate runs against
//! `lily_reference::ops`.

pub mod cases;
mod chunk_laws;
pub mod laws;
mod sampling_laws;

pub use laws::Subject;

/// A law with its name. It panics where the subject breaks it.
pub type Law = (&'static str, fn(&Subject<'_>));

/// All laws, for a program that holds the device at hand to them.
pub const LAWS: &[Law] = crate::every_law! { law_table [] };

/// Makes a module of tests per subject, one test per law, so that a failure names the law. Attributes of a subject go to
/// each of its tests.
///
/// ```ignore
/// lily_backend::conformance_suite! {
///     f32_kv: Subject { load: &|| Box::new(load(KvDtype::F32)), budget: 1e-3, experts_per_token: 2 };
/// }
/// ```
#[macro_export]
macro_rules! conformance_suite {
    ($($(#[$attribute:meta])* $suite:ident: $subject:expr;)+) => {$(
        mod $suite {
            use super::*;

            fn subject() -> $crate::conformance::Subject<'static> {
                $subject
            }

            $crate::every_law! { conformance_laws [$(#[$attribute])*] }
        }
    )+};
}

/// Hands the names of all laws to a macro, after its first argument; for [`conformance_suite!`] and [`LAWS`].
#[doc(hidden)]
#[macro_export]
macro_rules! every_law {
    ($then:ident $first:tt) => {
        $crate::laws_without_arithmetic! {
            $then $first
            greedy_takes_the_highest_logit_below_the_limit
            draws_depend_on_seed_and_position_only
            biases_and_penalties_move_the_choice
            a_trace_has_every_stage_and_changes_nothing
        }
    };
}

/// Likewise those that hold for a backend that computes nothing, whose samples need no logits; then the names that it is given.
#[doc(hidden)]
#[macro_export]
macro_rules! laws_without_arithmetic {
    ($then:ident $first:tt $($more:ident)*) => {
        $crate::$then! {
            $first
            prefill_equals_repeated_decode
            one_chunk_equals_many_chunks
            the_same_steps_give_the_same_bits
            batch_neighbours_do_not_change_a_row
            a_restored_snapshot_continues_bit_identical
            a_snapshot_outlives_the_steps_after_it_and_its_state
            a_snapshot_of_another_past_is_refused
            a_fork_continues_bit_identical_and_leaves_its_source_alone
            a_reset_state_is_a_fresh_one
            an_export_continues_bit_identical_after_import
            a_damaged_export_is_refused_and_leaves_position_0
            previous_sample_equals_explicit_token
            a_sampled_token_is_not_part_of_the_state
            steps_in_flight_are_bounded_and_waited_for_in_order
            refusals_leave_states_untouched
            a_full_context_is_an_error_and_its_last_token_fits
            what_was_freed_is_unknown
            stated_limits_hold
            log_probabilities_are_those_of_the_raw_logits
            a_mask_decides_what_may_be_sampled
            a_masked_step_is_alone_with_its_state
            $($more)*
        }
    };
}

/// A table of laws; for [`LAWS`].
#[doc(hidden)]
#[macro_export]
macro_rules! law_table {
    ([] $($law:ident)+) => {
        &[$((stringify!($law), laws::$law)),+]
    };
}

/// One test per law; for [`conformance_suite!`].
#[doc(hidden)]
#[macro_export]
macro_rules! conformance_laws {
    ($attributes:tt $($law:ident)+) => {
        $($crate::conformance_law! { $attributes $law })+
    };
}

/// The test of one law; for [`conformance_laws!`].
#[doc(hidden)]
#[macro_export]
macro_rules! conformance_law {
    ([$($attributes:tt)*] $law:ident) => {
        #[test]
        $($attributes)*
        fn $law() {
            $crate::conformance::laws::$law(&subject());
        }
    };
}
