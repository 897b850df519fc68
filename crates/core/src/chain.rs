//! Error messages with their causes.
//!
//! An error of this workspace prints its cause or returns it from [`source`](Error::source), never both. So
//! printing the chain repeats nothing and loses nothing.

use std::error::Error;
use std::iter;

/// Messages of `error` and its causes, joined by `": "`.
#[must_use]
pub fn chain(error: &dyn Error) -> String {
    let causes = iter::successors(error.source(), |cause: &&(dyn Error + 'static)| (*cause).source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::chain;
    use crate::driver::{DriverError, Op};
    use crate::pool::PoolError;

    #[test]
    fn each_error_adds_its_own_message() {
        let source = DriverError::invalid(Op::Map, "no such place");
        assert_eq!(chain(&source), "map: no such place");
        let error = PoolError::Driver { op: "trim", source };
        assert_eq!(error.to_string(), "cannot trim");
        assert_eq!(chain(&error), "cannot trim: map: no such place");
        assert_eq!(chain(&io::Error::other(error)), "cannot trim: map: no such place");
    }
}
