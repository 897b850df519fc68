//! x
use poorwill_testkit as _; use proptest as _;
