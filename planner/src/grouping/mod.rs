//! Which devices form replicas. [`fronts`] is exact for objectives on rates, [`enumerate`] looks at every plan,
//! [`genetic`] searches where there are too many.

pub(crate) mod enumerate;
pub(crate) mod fronts;
pub(crate) mod genetic;
pub(crate) mod local;
pub(crate) mod operators;
pub(crate) mod states;
