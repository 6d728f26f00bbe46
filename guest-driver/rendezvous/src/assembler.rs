// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A small assembler of eBPF instructions. Registers and labels have types, and `finish` resolves
//! the jumps. The kernel's verifier checks the result.

/// `struct bpf_insn`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Instruction {
    code: u8,
    /// Two numbers of four bits.
    registers: u8,
    offset: i16,
    immediate: i32,
}

/// The registers. A call takes its arguments in R1 to R5, overwrites them, and returns its result in R0. R6
/// to R9 keep their values over calls. R10 is the end of the stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reg {
    R0,
    R1,
    R2,
    R3,
    R4,
    R5,
    R6,
    R7,
    R8,
    R10,
}

impl Reg {
    fn number(self) -> u8 {
        match self {
            Reg::R0 => 0,
            Reg::R1 => 1,
            Reg::R2 => 2,
            Reg::R3 => 3,
            Reg::R4 => 4,
            Reg::R5 => 5,
            Reg::R6 => 6,
            Reg::R7 => 7,
            Reg::R8 => 8,
            Reg::R10 => 10,
        }
    }
}

/// The width of a load or store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Width {
    Byte,
    Word,
    Double,
}

impl Width {
    fn bits(self) -> u8 {
        match self {
            Width::Byte => 0x10,
            Width::Word => 0x00,
            Width::Double => 0x18,
        }
    }
}

/// The condition of a jump: compares 64 bits with a sign-extended constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    Equal,
    NotEqual,
    /// Any of the constant's bits is set.
    AnyOf,
    /// None of the constant's bits is set: two instructions.
    NoneOf,
    /// Less, with sign.
    Less,
}

/// Functions of the kernel: `enum bpf_func_id`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Helper {
    MapLookup = 1,
    MapUpdate = 2,
    MapDelete = 3,
    IsUnderCgroup = 37,
    GetSocketCookie = 46,
    SetSockOpt = 49,
    GetSockOpt = 57,
    SetCallbacks = 59,
    SocketHashUpdate = 70,
    RedirectMessage = 71,
    SocketStorage = 107,
    GetNetnsCookie = 122,
    LoadHeaderOption = 142,
    StoreHeaderOption = 143,
    ReserveHeaderOption = 144,
}

/// A target of jumps, whose position in the program may not be set yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Label(usize);

/// A program under construction.
#[derive(Debug, Default)]
pub(super) struct Assembler {
    code: Vec<Instruction>,
    /// The position of each label.
    positions: Vec<Option<usize>>,
    /// The target label of each jump.
    jumps: Vec<(usize, Label)>,
}

impl Assembler {
    /// A label without a position.
    pub(super) fn label(&mut self) -> Label {
        self.positions.push(None);
        Label(self.positions.len() - 1)
    }

    /// Sets the position of a label: the next instruction.
    pub(super) fn here(&mut self, label: Label) {
        if let Some(position) = self.positions.get_mut(label.0) {
            *position = Some(self.code.len());
        }
    }

    fn put(&mut self, code: u8, dst: Reg, src: u8, offset: i16, immediate: i32) {
        let (dst, src) = (dst.number(), src & 0xf);
        // The kernel has bit fields here, in the order of the bytes of a number.
        let registers =
            if cfg!(target_endian = "little") { dst | src << 4 } else { dst << 4 | src };
        self.code.push(Instruction { code, registers, offset, immediate });
    }

    /// `dst = src`
    pub(super) fn copy(&mut self, dst: Reg, src: Reg) {
        self.put(0xbf, dst, src.number(), 0, 0);
    }

    /// `dst = value`
    pub(super) fn set(&mut self, dst: Reg, value: i32) {
        self.put(0xb7, dst, 0, 0, value);
    }

    /// `dst = value`, 64 bits.
    pub(super) fn set64(&mut self, dst: Reg, value: u64) {
        self.put(0x18, dst, 0, 0, value as u32 as i32);
        self.put(0, Reg::R0, 0, 0, (value >> 32) as u32 as i32);
    }

    /// `dst = &map`
    pub(super) fn set_map(&mut self, dst: Reg, map: std::os::fd::RawFd) {
        const PSEUDO_MAP_FD: u8 = 1;
        self.put(0x18, dst, PSEUDO_MAP_FD, 0, map);
        self.put(0, Reg::R0, 0, 0, 0);
    }

    /// `dst = end of the stack + offset` (the offset is negative)
    pub(super) fn stack(&mut self, dst: Reg, offset: i16) {
        self.copy(dst, Reg::R10);
        self.put(0x07, dst, 0, 0, i32::from(offset));
    }

    /// `dst += value`
    pub(super) fn add(&mut self, dst: Reg, value: i32) {
        self.put(0x07, dst, 0, 0, value);
    }

    /// `dst |= value`
    pub(super) fn or(&mut self, dst: Reg, value: i32) {
        self.put(0x47, dst, 0, 0, value);
    }

    /// `dst &= value`
    pub(super) fn and(&mut self, dst: Reg, value: i32) {
        self.put(0x57, dst, 0, 0, value);
    }

    /// `dst ^= src`
    pub(super) fn xor(&mut self, dst: Reg, src: Reg) {
        self.put(0xaf, dst, src.number(), 0, 0);
    }

    /// `dst *= value`
    pub(super) fn multiply(&mut self, dst: Reg, value: i32) {
        self.put(0x27, dst, 0, 0, value);
    }

    /// `dst <<= bits`
    pub(super) fn shift_left(&mut self, dst: Reg, bits: i32) {
        self.put(0x67, dst, 0, 0, bits);
    }

    /// `dst >>= bits`, without sign.
    pub(super) fn shift_right(&mut self, dst: Reg, bits: i32) {
        self.put(0x77, dst, 0, 0, bits);
    }

    /// `dst = htobe32(dst)`
    pub(super) fn big_endian(&mut self, dst: Reg) {
        self.put(0xdc, dst, 0, 0, 32);
    }

    /// `base[offset] += src`, 64 bits, atomically.
    pub(super) fn atomic_add(&mut self, base: Reg, offset: i16, src: Reg) {
        self.put(0xdb, base, src.number(), offset, 0);
    }

    /// `dst = base[offset]`
    pub(super) fn load(&mut self, width: Width, dst: Reg, base: Reg, offset: i16) {
        self.put(0x61 | width.bits(), dst, base.number(), offset, 0);
    }

    /// `base[offset] = src`
    pub(super) fn store(&mut self, width: Width, base: Reg, offset: i16, src: Reg) {
        self.put(0x63 | width.bits(), base, src.number(), offset, 0);
    }

    /// `goto label`
    pub(super) fn jump(&mut self, label: Label) {
        self.jumps.push((self.code.len(), label));
        self.put(0x05, Reg::R0, 0, 0, 0);
    }

    /// `if reg <when> value goto label`
    pub(super) fn jump_if(&mut self, reg: Reg, when: When, value: i32, label: Label) {
        let code = match when {
            When::Equal => 0x15,
            When::NotEqual => 0x55,
            When::AnyOf => 0x45,
            When::Less => 0xc5,
            When::NoneOf => {
                // There is no such jump: skip the next one.
                self.put(0x45, reg, 0, 1, value);
                return self.jump(label);
            }
        };
        self.jumps.push((self.code.len(), label));
        self.put(code, reg, 0, 0, value);
    }

    /// `if left > right goto label`, without sign.
    pub(super) fn jump_if_beyond(&mut self, left: Reg, right: Reg, label: Label) {
        self.jumps.push((self.code.len(), label));
        self.put(0x2d, left, right.number(), 0, 0);
    }

    /// `r0 = helper(r1, ...)`
    pub(super) fn call(&mut self, helper: Helper) {
        self.put(0x85, Reg::R0, 0, 0, helper as i32);
    }

    /// `return r0`
    pub(super) fn exit(&mut self) {
        self.put(0x95, Reg::R0, 0, 0, 0);
    }

    /// The program; `None` if a label has no position or is too far from a jump.
    pub(super) fn finish(mut self) -> Option<Vec<Instruction>> {
        for (at, label) in self.jumps {
            let position = (*self.positions.get(label.0)?)?;
            let distance = i64::try_from(position).ok()? - i64::try_from(at).ok()? - 1;
            self.code.get_mut(at)?.offset = i16::try_from(distance).ok()?;
        }
        Some(self.code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(program: &[Instruction]) -> Vec<[u8; 8]> {
        program
            .iter()
            .map(|insn| {
                let (offset, value) = (insn.offset.to_le_bytes(), insn.immediate.to_le_bytes());
                [
                    insn.code,
                    insn.registers,
                    offset[0],
                    offset[1],
                    value[0],
                    value[1],
                    value[2],
                    value[3],
                ]
            })
            .collect()
    }

    /// The instructions as LLVM's assembler encodes them for `bpfel`.
    #[test]
    #[cfg(target_endian = "little")]
    fn encodes_as_other_assemblers_do() {
        let mut a = Assembler::default();
        let out = a.label();
        a.copy(Reg::R6, Reg::R1);
        a.load(Width::Word, Reg::R7, Reg::R6, 84);
        a.jump_if(Reg::R7, When::Equal, 3, out);
        a.set64(Reg::R1, 0xd9c3_d4e2_06fe);
        a.store(Width::Double, Reg::R10, -8, Reg::R1);
        a.stack(Reg::R2, -8);
        a.call(Helper::LoadHeaderOption);
        a.here(out);
        a.set(Reg::R0, 1);
        a.exit();
        assert_eq!(
            bytes(&a.finish().unwrap()),
            [
                [0xbf, 0x16, 0, 0, 0, 0, 0, 0],
                [0x61, 0x67, 84, 0, 0, 0, 0, 0],
                [0x15, 0x07, 6, 0, 3, 0, 0, 0],
                [0x18, 0x01, 0, 0, 0xfe, 0x06, 0xe2, 0xd4],
                [0, 0, 0, 0, 0xc3, 0xd9, 0, 0],
                [0x7b, 0x1a, 0xf8, 0xff, 0, 0, 0, 0],
                [0xbf, 0xa2, 0, 0, 0, 0, 0, 0],
                [0x07, 0x02, 0, 0, 0xf8, 0xff, 0xff, 0xff],
                [0x85, 0, 0, 0, 142, 0, 0, 0],
                [0xb7, 0, 0, 0, 1, 0, 0, 0],
                [0x95, 0, 0, 0, 0, 0, 0, 0],
            ]
        );
    }

    #[test]
    fn a_label_without_a_place_is_no_program() {
        let mut a = Assembler::default();
        let nowhere = a.label();
        a.jump(nowhere);
        assert_eq!(a.finish(), None);
    }

    #[test]
    fn jumps_go_backwards_too() {
        let mut a = Assembler::default();
        let top = a.label();
        a.here(top);
        a.set(Reg::R0, 0);
        a.jump(top);
        assert_eq!(a.finish().unwrap()[1].offset, -2);
    }

    #[test]
    fn none_of_skips_a_jump() {
        let mut a = Assembler::default();
        let out = a.label();
        a.jump_if(Reg::R2, When::NoneOf, 2, out);
        a.set(Reg::R0, 0);
        a.here(out);
        a.exit();
        let program = a.finish().unwrap();
        assert_eq!((program[0].code, program[0].offset), (0x45, 1));
        assert_eq!((program[1].code, program[1].offset), (0x05, 1));
    }
}
