//! Deserializes tables whose `kind` key determines the other keys, with errors that know their key.
//!
//! serde's internally tagged enums buffer the whole table first, and errors then lose their key. Here
//! the `kind` is read first, and the other keys go directly into the type of that kind. So a wrapper
//! that tracks the path (`serde_path_to_error`) sees each key. [`Tree`] yields a table's `kind` first,
//! whatever the order in the file. Another deserializer that yields it later also works, through a
//! buffer, but loses the path.
//!
//! This module only reads; serde's derive writes types with kinds.

use serde::{
    Deserialize, Deserializer,
    de::{
        DeserializeSeed, Error, Expected, IntoDeserializer, MapAccess, Unexpected, Visitor,
        value::{MapAccessDeserializer, MapDeserializer, SeqDeserializer},
    },
};
use std::{fmt, marker::PhantomData};
use toml::{Table, Value};

/// The key that determines the other keys.
pub const KIND: &str = "kind";

/// A type that is deserialized from a table with a [`KIND`]; see [`kinds!`](crate::kinds).
pub trait Kinds: Sized {
    /// The names of the kinds.
    const KINDS: &'static [&'static str];
    /// The kind of a table without a `kind` key, if the key is optional.
    const DEFAULT: Option<&'static str>;

    /// Reads the other keys of a table of this kind, which is one of [`Self::KINDS`].
    fn read<'de, D: Deserializer<'de>>(kind: &str, options: D) -> Result<Self, D::Error>;
}

/// The body of `Deserialize` for a type with kinds.
pub fn deserialize<'de, T: Kinds, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    deserializer.deserialize_map(OfKind(PhantomData))
}

/// Implements [`Kinds`] and `Deserialize`: for each kind its name, and a function that makes the type of its options.
///
/// ```
/// use serde::Deserialize;
/// #[derive(Debug, PartialEq)]
/// enum Shape { Round { radius: f64 }, None }
/// #[derive(Deserialize)]
/// #[serde(deny_unknown_fields)]
/// struct Round { radius: f64 }
/// paraft_common::kinds!(Shape or "none" {
///     "round" => |o: Round| Self::Round { radius: o.radius },
///     "none" => |_: paraft_common::kind::NoOptions| Self::None,
/// });
/// assert_eq!(toml::from_str("radius = 2.5\nkind = \"round\""), Ok(Shape::Round { radius: 2.5 }));
/// assert_eq!(toml::from_str(""), Ok(Shape::None));
/// assert!(toml::from_str::<Shape>("radius = 2.5").is_err());
/// ```
#[macro_export]
macro_rules! kinds {
    ($name:ident { $($kind:literal => $make:expr),+ $(,)? }) => {
        $crate::kinds!(@ $name, None, { $($kind => $make),+ });
    };
    ($name:ident or $default:literal { $($kind:literal => $make:expr),+ $(,)? }) => {
        $crate::kinds!(@ $name, Some($default), { $($kind => $make),+ });
    };
    (@ $name:ident, $default:expr, { $($kind:literal => $make:expr),+ }) => {
        impl $crate::kind::Kinds for $name {
            const KINDS: &'static [&'static str] = &[$($kind),+];
            const DEFAULT: Option<&'static str> = $default;

            fn read<'de, D: ::serde::Deserializer<'de>>(kind: &str, options: D) -> Result<Self, D::Error> {
                match kind {
                    $($kind => ::serde::Deserialize::deserialize(options).map($make),)+
                    _ => Err(::serde::de::Error::unknown_variant(kind, Self::KINDS)),
                }
            }
        }

        impl<'de> ::serde::Deserialize<'de> for $name {
            fn deserialize<D: ::serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                $crate::kind::deserialize(deserializer)
            }
        }
    };
}

/// The options of a kind without options: every key is refused.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NoOptions {}

struct OfKind<T>(PhantomData<T>);

impl<'de, T: Kinds> Visitor<'de> for OfKind<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a table with a `kind`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<T, A::Error> {
        let Some(first) = map.next_key::<String>()? else {
            let kind = T::DEFAULT.ok_or_else(|| A::Error::missing_field(KIND))?;
            return T::read(kind, Tree::of(&Value::Table(Table::new())));
        };
        if first == KIND {
            let kind = map.next_value_seed(Name(T::KINDS))?;
            return T::read(kind, MapAccessDeserializer::new(map));
        }
        let mut options = Table::new();
        let mut kind = None;
        let mut next = Some(first);
        while let Some(key) = next {
            if key == KIND {
                kind = Some(map.next_value_seed(Name(T::KINDS))?);
            } else {
                options.insert(key, map.next_value()?);
            }
            next = map.next_key()?;
        }
        let kind = kind.or(T::DEFAULT).ok_or_else(|| A::Error::missing_field(KIND))?;
        T::read(kind, Tree::of(&Value::Table(options)))
    }
}

/// Deserializes the name of a kind.
struct Name(&'static [&'static str]);

impl<'de> DeserializeSeed<'de> for Name {
    type Value = &'static str;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        let name = String::deserialize(deserializer)?;
        let known = self.0.iter().find(|k| **k == name);
        known.copied().ok_or_else(|| D::Error::unknown_variant(&name, self.0))
    }
}

/// A TOML value as a serde deserializer with any error type. It yields a table's [`KIND`] first, and
/// names types in TOML's terms in errors.
pub struct Tree<'a, E> {
    value: &'a Value,
    error: PhantomData<E>,
}

impl<'a, E: Error> Tree<'a, E> {
    /// A deserializer of `value`.
    pub fn of(value: &'a Value) -> Self {
        Self { value, error: PhantomData }
    }

    fn instead_of(&self, wanted: &dyn Expected) -> E {
        E::invalid_type(
            match self.value {
                Value::String(s) => Unexpected::Str(s),
                Value::Integer(i) => Unexpected::Signed(*i),
                Value::Float(f) => Unexpected::Float(*f),
                Value::Boolean(b) => Unexpected::Bool(*b),
                Value::Datetime(_) => Unexpected::Other("a date or time"),
                Value::Array(_) => Unexpected::Other("a list"),
                Value::Table(_) => Unexpected::Other("a table"),
            },
            wanted,
        )
    }

    fn whole<T: TryFrom<i64>>(&self, wanted: &str) -> Result<T, E> {
        let Value::Integer(i) = self.value else { return Err(self.instead_of(&wanted)) };
        T::try_from(*i).map_err(|_| E::invalid_value(Unexpected::Signed(*i), &wanted))
    }
}

impl<'de, E: Error> IntoDeserializer<'de, E> for Tree<'_, E> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

/// Integers, with a range check.
macro_rules! whole {
    ($($read:ident, $visit:ident, $wanted:literal;)+) => {
        $(fn $read<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, E> {
            visitor.$visit(self.whole($wanted)?)
        })+
    };
}

/// Forwards to the visitor if the value has one of these forms; otherwise an error names the expected
/// type.
macro_rules! of_form {
    ($($read:ident, $form:pat, $wanted:literal;)+) => {
        $(fn $read<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, E> {
            if matches!(self.value, $form) { self.deserialize_any(visitor) } else { Err(self.instead_of(&$wanted)) }
        })+
    };
}

impl<'de, E: Error> Deserializer<'de> for Tree<'_, E> {
    type Error = E;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, E> {
        match self.value {
            Value::String(s) => visitor.visit_str(s),
            Value::Integer(i) => visitor.visit_i64(*i),
            Value::Float(f) => visitor.visit_f64(*f),
            Value::Boolean(b) => visitor.visit_bool(*b),
            Value::Datetime(_) => Err(self.instead_of(&visitor)),
            Value::Array(values) => {
                let mut values = SeqDeserializer::new(values.iter().map(Tree::of));
                let read = visitor.visit_seq(&mut values)?;
                values.end().map(|()| read)
            }
            Value::Table(table) => {
                let (first, rest): (Vec<_>, Vec<_>) = table.iter().partition(|(key, _)| *key == KIND);
                let entries = first.into_iter().chain(rest);
                let mut entries = MapDeserializer::new(entries.map(|(k, v)| (k.as_str(), Tree::of(v))));
                let read = visitor.visit_map(&mut entries)?;
                entries.end().map(|()| read)
            }
        }
    }

    whole! {
        deserialize_u8, visit_u8, "a whole number from 0 to 255";
        deserialize_u16, visit_u16, "a whole number from 0 to 65535";
        deserialize_u32, visit_u32, "a whole number from 0 to 4294967295";
        deserialize_u64, visit_u64, "a whole number from 0";
        deserialize_i8, visit_i8, "a whole number from -128 to 127";
        deserialize_i16, visit_i16, "a whole number from -32768 to 32767";
        deserialize_i32, visit_i32, "a whole number from -2147483648 to 2147483647";
        deserialize_i64, visit_i64, "a whole number";
    }

    of_form! {
        deserialize_bool, Value::Boolean(_), "true or false";
        deserialize_f32, Value::Float(_) | Value::Integer(_), "a number";
        deserialize_f64, Value::Float(_) | Value::Integer(_), "a number";
        deserialize_str, Value::String(_), "a text";
        deserialize_string, Value::String(_), "a text";
        deserialize_seq, Value::Array(_), "a list";
        deserialize_map, Value::Table(_), "a table";
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, E> {
        self.deserialize_map(visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        words: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, E> {
        match self.value {
            Value::String(word) => visitor.visit_enum(word.as_str().into_deserializer()),
            _ => Err(self.instead_of(&OneOf(words))),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, E> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, E> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, E> {
        visitor.visit_unit()
    }

    serde::forward_to_deserialize_any! {
        i128 u128 char bytes byte_buf unit unit_struct tuple tuple_struct identifier
    }
}

/// Displays the alternatives in quotes.
struct OneOf(&'static [&'static str]);

impl Expected for OneOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, word) in self.0.iter().enumerate() {
            write!(f, "{}\"{word}\"", if i == 0 { "" } else { " or " })?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "kind_tests.rs"]
mod tests;
