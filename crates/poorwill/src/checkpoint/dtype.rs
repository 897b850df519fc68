//! Element types of the safetensors format.

use std::fmt;

use serde::{Serialize, Serializer};

macro_rules! dtypes {
    ($($(#[$doc:meta])* $name:ident: $bits:literal,)*) => {
        /// A tensor's element type. Ordered as the reference implementation lays tensors out: strictest
        /// alignment last.
        ///
        /// ```
        /// use poorwill::checkpoint::Dtype;
        ///
        /// let dtype = Dtype::of("BF16").ok_or("no such type")?;
        /// assert_eq!((dtype, dtype.name(), dtype.bits()), (Dtype::BF16, "BF16", 16));
        /// # Ok::<(), &str>(())
        /// ```
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[allow(non_camel_case_types, clippy::upper_case_acronyms)] // The format's own names.
        #[non_exhaustive]
        pub enum Dtype {
            $($(#[$doc])* $name,)*
        }

        impl Dtype {
            pub(super) const ALL: &[Self] = &[$(Self::$name),*];

            /// The format's name.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)*
                }
            }

            /// Bits of an element; elements below a byte are packed.
            #[must_use]
            pub const fn bits(self) -> u64 {
                match self {
                    $(Self::$name => $bits,)*
                }
            }
        }
    };
}

dtypes! {
    /// A boolean byte.
    BOOL: 8,
    /// Microscaling float: 2 bits of exponent, 1 of mantissa.
    F4: 4,
    /// Microscaling float: 2 bits of exponent, 3 of mantissa.
    F6_E2M3: 6,
    /// Microscaling float: 3 bits of exponent, 2 of mantissa.
    F6_E3M2: 6,
    /// Unsigned integer.
    U8: 8,
    /// Signed integer.
    I8: 8,
    /// Float: 5 bits of exponent, 2 of mantissa.
    F8_E5M2: 8,
    /// Float: 4 bits of exponent, 3 of mantissa.
    F8_E4M3: 8,
    /// A power of two: the microscaling scale.
    F8_E8M0: 8,
    /// Finite float without negative zero: 4 bits of exponent, 3 of mantissa.
    F8_E4M3FNUZ: 8,
    /// Finite float without negative zero: 5 bits of exponent, 2 of mantissa.
    F8_E5M2FNUZ: 8,
    /// Signed integer.
    I16: 16,
    /// Unsigned integer.
    U16: 16,
    /// Half precision.
    F16: 16,
    /// bfloat16.
    BF16: 16,
    /// Signed integer.
    I32: 32,
    /// Unsigned integer.
    U32: 32,
    /// Single precision.
    F32: 32,
    /// Single-precision complex number.
    C64: 64,
    /// Double precision.
    F64: 64,
    /// Signed integer.
    I64: 64,
    /// Unsigned integer.
    U64: 64,
}

impl Dtype {
    /// The type of this name.
    #[must_use]
    pub fn of(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|dtype| dtype.name() == name)
    }
}

impl Serialize for Dtype {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde::de::value::{Error, StrDeserializer};

    use super::Dtype;

    #[test]
    fn they_are_the_reference_implementations() {
        let theirs = |dtype: &Dtype| {
            safetensors::Dtype::deserialize(StrDeserializer::<Error>::new(dtype.name())).unwrap()
        };
        for dtype in Dtype::ALL {
            let theirs =
                safetensors::Dtype::deserialize(StrDeserializer::<Error>::new(dtype.name())).unwrap();
            assert_eq!((theirs.to_string(), theirs.bitsize() as u64), (dtype.to_string(), dtype.bits()));
            assert_eq!(Dtype::of(dtype.name()), Some(*dtype));
        }
        assert!(Dtype::ALL.is_sorted() && Dtype::ALL.iter().map(theirs).is_sorted());
        // The error lists the known names.
        let message =
            safetensors::Dtype::deserialize(StrDeserializer::<Error>::new("F33")).unwrap_err().to_string();
        let known = message.split('`').skip(3).step_by(2);
        assert_eq!(known.clone().count(), Dtype::ALL.len(), "{message}");
        assert!(known.into_iter().all(|name| Dtype::of(name).is_some()), "{message}");
        assert_eq!(Dtype::of("f32"), None);
    }
}
