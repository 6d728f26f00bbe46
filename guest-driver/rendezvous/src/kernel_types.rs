// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Numbers of functions in the kernel's own BPF Type Format (Linux: Documentation/bpf/btf.rst).

/// The file with the types of the running kernel.
pub(super) const FILE: &str = "/sys/kernel/btf/vmlinux";

const MAGIC: u16 = 0xeb9f;
const KIND_FUNC: u32 = 12;
/// Length of a type without the data of its kind.
const TYPE: usize = 12;

/// The number of a function. `None`: the kernel has no such function, or the bytes are not understood.
pub(super) fn function(btf: &[u8], name: &str) -> Option<u32> {
    if u16::from_ne_bytes(btf.get(..2)?.try_into().ok()?) != MAGIC {
        return None;
    }
    let [header, types_at, types_len, names_at, names_len] =
        [4, 8, 12, 16, 20].map(|at| word(btf, at).map(|word| word as usize));
    let section = |at: Option<usize>, len: Option<usize>| btf.get(header? + at?..)?.get(..len?);
    let (mut types, names) = (section(types_at, types_len)?, section(names_at, names_len)?);
    let mut number = 1;
    while !types.is_empty() {
        let (name_at, info) = (word(types, 0)? as usize, word(types, 4)?);
        let kind = info >> 24 & 0x1f;
        let is_named = || {
            let rest = names.get(name_at..)?.strip_prefix(name.as_bytes())?;
            rest.starts_with(&[0]).then_some(())
        };
        if kind == KIND_FUNC && is_named().is_some() {
            return Some(number);
        }
        types = types.get(TYPE + data(kind, (info & 0xffff) as usize)?..)?;
        number += 1;
    }
    None
}

/// Length of the data of a kind with so many members. `None`: an unknown kind.
fn data(kind: u32, members: usize) -> Option<usize> {
    Some(match kind {
        // Pointers, forwards, names of types, qualifiers, functions, floats, tags of types.
        2 | 7..=12 | 16 | 18 => 0,
        // Integers, variables, tags of declarations.
        1 | 14 | 17 => 4,
        // Arrays.
        3 => 12,
        // Enumerations, parameters of functions.
        6 | 13 => 8 * members,
        // Structures, unions, sections of data, enumerations of 64 bits.
        4 | 5 | 15 | 19 => 12 * members,
        _ => return None,
    })
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Types of 32-bit words, with the names "", "one" (1) and "two" (5).
    fn btf(types: &[u32]) -> Vec<u8> {
        let mut bytes = MAGIC.to_ne_bytes().to_vec();
        bytes.extend([1, 0]);
        let len = types.len() as u32 * 4;
        bytes.extend(
            [24, 0, len, len, 9]
                .into_iter()
                .chain(types.iter().copied())
                .flat_map(u32::to_ne_bytes),
        );
        bytes.extend(b"\0one\0two\0");
        bytes
    }

    #[test]
    fn a_function_is_found_behind_types_of_any_length() {
        let structure = [0, 4 << 24 | 2, 8, 1, 1, 0, 5, 1, 32];
        let types = [&structure[..], &[1, 1 << 24, 4, 32], &[1, 12 << 24, 1], &[5, 12 << 24, 1]];
        let whole = btf(&types.concat());
        assert_eq!(function(&whole, "one"), Some(3));
        assert_eq!(function(&whole, "two"), Some(4));
        assert_eq!(function(&whole, "on"), None);
        for len in 0..whole.len() {
            assert_eq!(function(&whole[..len], "three"), None, "{len} bytes");
        }
    }

    #[test]
    fn an_unknown_kind_ends_the_search() {
        assert_eq!(function(&btf(&[0, 31 << 24, 0, 1, 12 << 24, 1]), "one"), None);
    }
}
