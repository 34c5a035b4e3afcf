//! What the repository's chores and its tidy tests share: which files there are, and which are generated.
//!
//! It reads the checkout and asks git and cargo; it must not know anything of what Shoal does when it runs.
#![forbid(unsafe_code)]

pub mod documents;
pub mod repository;
