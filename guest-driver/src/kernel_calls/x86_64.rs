// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Instructions of x86-64: their lengths, and their effect on the register with a call's number.

use std::ffi::c_long;

/// Bytes of an instruction calling the kernel.
pub(super) const LENGTH: usize = 2;
const SYSCALL: [u8; LENGTH] = [0x0f, 0x05];
const INT_80: [u8; LENGTH] = [0xcd, 0x80];

/// Bytes compared at once.
const BLOCK: usize = 64;

/// The places of such instructions' bytes.
pub(super) fn candidates(code: &[u8]) -> impl Iterator<Item = usize> {
    let blocks = code.chunks(BLOCK).zip(code.get(1..).unwrap_or_default().chunks(BLOCK));
    let found = blocks.enumerate().filter(|(_, (first, last))| may_have(first, last));
    found.flat_map(|(block, (first, last))| {
        let places = first.iter().zip(last).enumerate();
        let calls = places.filter(|(_, (first, last))| is_call(**first, **last));
        calls.map(move |(at, _)| block * BLOCK + at)
    })
}

fn is_call(first: u8, last: u8) -> bool {
    [first, last] == SYSCALL || [first, last] == INT_80
}

/// Whether one of the pairs is such an instruction. Without a branch for each pair, so the processor
/// compares 16 at once.
fn may_have(first: &[u8], last: &[u8]) -> bool {
    let (Ok(first), Ok(last)) = (<&[u8; BLOCK]>::try_from(first), <&[u8; BLOCK]>::try_from(last))
    else {
        return true;
    };
    let is = |(first, last): (&u8, &u8), pair: [u8; 2]| (*first ^ pair[0]) | (*last ^ pair[1]);
    let pairs = first.iter().zip(last);
    pairs.fold(u8::MAX, |least, pair| least.min(is(pair, SYSCALL)).min(is(pair, INT_80))) == 0
}

/// The number of the kernel call by the last instruction: `Some(None)` if unknown. `None`: the last
/// bytes are in the middle of another instruction.
pub(super) fn number_of_last(code: &[u8]) -> Option<Option<c_long>> {
    let (last, mut at, mut number) = (code.len().checked_sub(LENGTH)?, 0, None);
    let mut pushed = None;
    // An instruction around the last bytes ends behind them.
    let code = [code, &[0; 16]].concat();
    while at < last {
        let rest = code.get(at..)?;
        let (length, effect) = instruction(rest).unwrap_or((1, Effect::Loses));
        number = match effect {
            Effect::Keeps => number,
            Effect::Loses => None,
            Effect::Sets(value) => Some(value),
            Effect::Pops => pushed,
        };
        pushed = match rest {
            [0x6a, value, ..] => Some(c_long::from(*value)),
            _ => None,
        };
        at += length;
    }
    (at == last).then_some(number)
}

/// The effect of an instruction on the register with the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Effect {
    Keeps,
    /// The value changes, or another path to the call begins here.
    Loses,
    Sets(c_long),
    /// The register gets the last value pushed.
    Pops,
}

/// The prefixes of an instruction.
#[derive(Clone, Copy, Default)]
struct Prefixes {
    /// Operands of 16 bits.
    short: bool,
    /// Addresses of 32 bits.
    short_address: bool,
    rex: u8,
}

impl Prefixes {
    fn is_wide(self) -> bool {
        self.rex & 8 != 0
    }

    /// Bytes of an immediate operand of the usual size.
    fn immediate(self) -> usize {
        if self.short && !self.is_wide() { 2 } else { 4 }
    }
}

/// The length of the first instruction and its effect. `None`: none begins here.
fn instruction(code: &[u8]) -> Option<(usize, Effect)> {
    let (mut prefixes, mut at) = (Prefixes::default(), 0);
    loop {
        match code.get(at)? {
            0x66 => prefixes.short = true,
            0x67 => prefixes.short_address = true,
            0x26 | 0x2e | 0x36 | 0x3e | 0x64 | 0x65 | 0xf0 | 0xf2 | 0xf3 => {}
            _ => break,
        }
        at += 1;
    }
    if let Some(rex @ 0x40..=0x4f) = code.get(at) {
        (prefixes.rex, at) = (*rex, at + 1);
    }
    let opcode = *code.get(at)?;
    let rest = code.get(at + 1..)?;
    let (length, effect) = match opcode {
        0x0f => two_bytes(rest, prefixes)?,
        // Vectors: VEX with one byte and with two, EVEX.
        0xc5 => (2 + of_vectors(1, rest.get(1..)?)?, Effect::Keeps),
        0xc4 => (3 + of_vectors(rest.first()? & 0x1f, rest.get(2..)?)?, Effect::Keeps),
        0x62 => (4 + of_vectors(rest.first()? & 7, rest.get(3..)?)?, Effect::Keeps),
        _ => one_byte(opcode, rest, prefixes)?,
    };
    Some((at + 1 + length, effect))
}

/// Behind the prefix of an instruction on vectors: its opcode and operands.
fn of_vectors(map: u8, code: &[u8]) -> Option<usize> {
    let opcode = *code.first()?;
    let has_immediate = map == 3 || map == 1 && matches!(opcode, 0x70..=0x73 | 0xc2 | 0xc4..=0xc6);
    match (map, opcode) {
        // vzeroupper
        (1, 0x77) => Some(0),
        (1..=6, _) => Some(operands(code.get(1..)?)? + usize::from(has_immediate)),
        _ => None,
    }
}

/// The length of the operands, beginning with a ModRM byte.
fn operands(code: &[u8]) -> Option<usize> {
    let modrm = *code.first()?;
    let (kind, rm) = (modrm >> 6, modrm & 7);
    if kind == 3 {
        return Some(1);
    }
    let has_sib = rm == 4;
    let base = if has_sib { *code.get(1)? & 7 } else { rm };
    let displacement = match kind {
        0 if base == 5 => 4,
        0 => 0,
        1 => 1,
        _ => 4,
    };
    Some(1 + usize::from(has_sib) + displacement)
}

/// Whether a ModRM byte names the register with the number: as the other operand, and as the register
/// operand.
fn names_it(code: &[u8], prefixes: Prefixes) -> (bool, bool) {
    let modrm = code.first().copied().unwrap_or(0);
    let other = modrm >> 6 == 3 && modrm & 7 == 0 && prefixes.rex & 1 == 0;
    (other, modrm >> 3 & 7 == 0 && prefixes.rex & 4 == 0)
}

fn loses_if(is_written: bool) -> Effect {
    if is_written { Effect::Loses } else { Effect::Keeps }
}

fn number(code: &[u8], at: usize) -> Option<c_long> {
    let bytes = code.get(at..at + 4)?.try_into().ok()?;
    Some(c_long::from(i32::from_le_bytes(bytes)))
}

fn one_byte(opcode: u8, code: &[u8], prefixes: Prefixes) -> Option<(usize, Effect)> {
    use Effect::{Keeps, Loses, Pops, Sets};
    let (other, register) = names_it(code, prefixes);
    let part = code.first().map_or(0, |modrm| modrm >> 3 & 7);
    let immediate = prefixes.immediate();
    Some(match opcode {
        // xor eax, eax
        0x31 | 0x33 if code.first() == Some(&0xc0) && prefixes.rex & 5 == 0 => (1, Sets(0)),
        0x00..=0x3f => match opcode & 7 {
            // Comparisons.
            0..=3 if opcode >= 0x38 => (operands(code)?, Keeps),
            0 | 1 => (operands(code)?, loses_if(other)),
            2 | 3 => (operands(code)?, loses_if(register)),
            4 => (1, loses_if(opcode < 0x38)),
            5 => (immediate, loses_if(opcode < 0x38)),
            _ => return None,
        },
        0x50..=0x57 => (0, Keeps),
        0x58 if prefixes.rex & 1 == 0 => (0, Pops),
        0x58..=0x5f => (0, Keeps),
        0x63 => (operands(code)?, loses_if(register)),
        0x68 => (immediate, Keeps),
        0x69 => (operands(code)? + immediate, loses_if(register)),
        0x6a => (1, Keeps),
        0x6b => (operands(code)? + 1, loses_if(register)),
        0x6c..=0x6f | 0xa4..=0xa7 | 0xaa | 0xab | 0xae | 0xaf => (0, Keeps),
        0x70..=0x7f | 0xe0..=0xe3 => (1, Keeps),
        0x80 | 0x83 => (operands(code)? + 1, loses_if(other && part != 7)),
        0x81 => (operands(code)? + immediate, loses_if(other && part != 7)),
        0x84 | 0x85 | 0x8c | 0x8e => (operands(code)?, Keeps),
        0x86 | 0x87 => (operands(code)?, loses_if(other || register)),
        0x88 | 0x89 | 0x8f => (operands(code)?, loses_if(other)),
        0x8a | 0x8b | 0x8d => (operands(code)?, loses_if(register)),
        0x90 | 0x98 | 0x99 | 0x9b..=0x9e | 0xf5 | 0xf8..=0xfd => (0, Keeps),
        0x91..=0x97 | 0x9f | 0xac | 0xad | 0xd7 => (0, Loses),
        0xa0..=0xa3 => (if prefixes.short_address { 4 } else { 8 }, loses_if(opcode < 0xa2)),
        0xa8 => (1, Keeps),
        0xa9 => (immediate, Keeps),
        0xb0..=0xb7 => (1, loses_if(opcode == 0xb0 || opcode == 0xb4)),
        0xb8..=0xbf => {
            let length = if prefixes.is_wide() { 8 } else { immediate };
            let sets = opcode == 0xb8 && prefixes.rex & 1 == 0 && !prefixes.short;
            (length, if sets { Sets(number(code, 0)?) } else { Keeps })
        }
        0xc0 | 0xc1 => (operands(code)? + 1, loses_if(other)),
        0xc2 | 0xca => (2, Loses),
        0xc6 => (operands(code)? + 1, loses_if(other)),
        0xc7 if other && !prefixes.short => (1 + immediate, Sets(number(code, 1)?)),
        0xc7 => (operands(code)? + immediate, loses_if(other)),
        0xc8 => (3, Keeps),
        0xc9 => (0, Keeps),
        0xc3 | 0xcb | 0xcc | 0xcf | 0xf1 | 0xf4 => (0, Loses),
        0xcd | 0xeb => (1, Loses),
        0xd0..=0xd3 => (operands(code)?, loses_if(other)),
        0xd8..=0xdf => (operands(code)?, loses_if(opcode == 0xdf && code.first() == Some(&0xe0))),
        0xe4..=0xe7 => (1, Loses),
        0xe8 | 0xe9 => (4, Loses),
        0xec..=0xef => (0, Loses),
        // A test has an operand more.
        0xf6 if part < 2 => (operands(code)? + 1, Keeps),
        0xf7 if part < 2 => (operands(code)? + immediate, Keeps),
        0xf6 | 0xf7 => (operands(code)?, loses_if(other || part >= 4)),
        0xfe => (operands(code)?, loses_if(other)),
        // Increments, calls, jumps, and a push.
        0xff => (operands(code)?, loses_if((2..6).contains(&part) || other && part < 2)),
        _ => return None,
    })
}

fn two_bytes(code: &[u8], prefixes: Prefixes) -> Option<(usize, Effect)> {
    use Effect::{Keeps, Loses};
    let (opcode, code) = code.split_first()?;
    let (other, register) = names_it(code, prefixes);
    let (length, effect) = match opcode {
        0x05 | 0x07 | 0x31 | 0x33 | 0x34 | 0xa2 => (0, Loses),
        0x06 | 0x08 | 0x09 | 0x0b | 0x0e | 0x30 | 0x32 | 0x35 | 0x37 | 0x77 => (0, Keeps),
        0xa0 | 0xa1 | 0xa8 | 0xa9 | 0xaa | 0xc9..=0xcf => (0, Keeps),
        0xc8 => (0, loses_if(prefixes.rex & 1 == 0)),
        0x38 => (1 + operands(code.get(1..)?)?, Keeps),
        0x3a => (2 + operands(code.get(1..)?)?, Keeps),
        0x80..=0x8f => (4, Keeps),
        0x40..=0x4f | 0xaf | 0xb2 | 0xb4..=0xb8 | 0xbc..=0xbf => {
            (operands(code)?, loses_if(register))
        }
        0x90..=0x9f | 0xab | 0xb3 | 0xbb => (operands(code)?, loses_if(other)),
        0xa3 | 0xa5 | 0xad => (operands(code)?, loses_if(other && *opcode != 0xa3)),
        0xa4 | 0xac | 0xba => (operands(code)? + 1, loses_if(other)),
        0xb0 | 0xb1 => (operands(code)?, Loses),
        0xc0 | 0xc1 => (operands(code)?, loses_if(other || register)),
        0x0f | 0x70..=0x73 | 0xc2 | 0xc4..=0xc6 => (operands(code)? + 1, Keeps),
        // A word of a vector.
        0x7e | 0xd7 | 0x50 => (operands(code)?, loses_if(other || register)),
        0x2c | 0x2d => (operands(code)?, loses_if(register)),
        _ => (operands(code)?, Keeps),
    };
    Some((1 + length, effect))
}
