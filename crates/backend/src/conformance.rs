//! Cases and laws that every backend is held to.
