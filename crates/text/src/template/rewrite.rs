//! Wraps every expression that can make a list or dict grow in the filter [`GUARD`], and every assignment to an
//! attribute of a namespace in [`STORE`], so that [`super::guard`] sees each such value before anything else does.
//!
//! The engine (minijinja 3.1) has no hook for operators, literals and assignments, so the source is rewritten: the
//! engine's own parser says where each expression starts and ends. The result is parsed again and checked to be
//! wrapped everywhere; a template for which that does not come out is refused rather than run unguarded.

use minijinja::machinery::ast::{BinOpKind, Call, CallArg, Expr, Stmt};
use minijinja::machinery::{Span, parse};
use minijinja::syntax::SyntaxConfig;

/// Filter of one value; see [`super::guard::Guard::admit`].
pub(super) const GUARD: &str = "castiron_admit";
/// Filter of a value, a namespace and an attribute name; see [`super::guard::Guard::store`].
pub(super) const STORE: &str = "castiron_store";

/// Filters whose result is a string, a number or a boolean whatever they are given.
const SCALAR: [&str; 22] = [
    "abs",
    "bool",
    "capitalize",
    "count",
    "e",
    "escape",
    "float",
    "format",
    "indent",
    "int",
    "join",
    "length",
    "lower",
    "pprint",
    "replace",
    "round",
    "string",
    "title",
    "tojson",
    "trim",
    "upper",
    "urlencode",
];

/// Why a template was not rewritten.
pub(super) enum Refusal {
    /// The engine's own complaint.
    Syntax(minijinja::Error),
    /// The guarded form is no template any more, at this line.
    Unguarded(usize),
    /// The source uses the name of one of our filters.
    Reserved(&'static str),
}

/// `source` with its guards.
pub(super) fn guarded(name: &str, source: &str, syntax: &SyntaxConfig) -> Result<String, Refusal> {
    for reserved in [GUARD, STORE] {
        if source.contains(reserved) {
            return Err(Refusal::Reserved(reserved));
        }
    }
    let mut pass = Pass { source, inserts: Vec::new(), check: false, bare: None };
    let tree = parse(source, name, syntax.clone()).map_err(Refusal::Syntax)?;
    pass.stmt(&tree);
    drop(tree);
    let mut inserts = pass.inserts;
    // Stable: what was noted first at a place belongs to the inner expression.
    inserts.sort_by_key(|insert| insert.0);
    let mut out = String::with_capacity(source.len() + 32 * inserts.len());
    let mut done = 0;
    for (at, text) in inserts {
        let piece = source.get(done..at).ok_or(Refusal::Unguarded(0))?;
        out.push_str(piece);
        out.push_str(&text);
        done = at;
    }
    out.push_str(source.get(done..).ok_or(Refusal::Unguarded(0))?);
    let tree = parse(&out, name, syntax.clone()).map_err(|e| Refusal::Unguarded(e.line().unwrap_or(0)))?;
    let mut pass = Pass { source: &out, inserts: Vec::new(), check: true, bare: None };
    pass.stmt(&tree);
    match pass.bare {
        Some(line) => Err(Refusal::Unguarded(line)),
        None => {
            drop(tree);
            Ok(out)
        }
    }
}

/// One traversal: notes what to insert, or checks that everything is wrapped.
struct Pass<'s> {
    source: &'s str,
    inserts: Vec<(usize, String)>,
    check: bool,
    /// Line of the first expression found without its guard.
    bare: Option<usize>,
}

impl Pass<'_> {
    fn missing(&mut self, span: Span) {
        self.bare.get_or_insert(usize::from(span.start_line));
    }

    fn wrap(&mut self, start: usize, end: usize, filters: &str) {
        self.inserts.push((end, format!("){filters}")));
        self.inserts.push((start, "(".to_string()));
    }

    fn stmts(&mut self, list: &[Stmt<'_>]) {
        list.iter().for_each(|stmt| self.stmt(stmt));
    }

    fn stmt(&mut self, stmt: &Stmt<'_>) {
        match stmt {
            Stmt::Template(t) => self.stmts(&t.children),
            Stmt::EmitExpr(e) => self.expr(&e.expr),
            Stmt::EmitRaw(_) | Stmt::Continue(_) | Stmt::Break(_) => {}
            Stmt::ForLoop(l) => {
                self.expr(&l.iter);
                l.filter_expr.iter().for_each(|e| self.expr(e));
                self.stmts(&l.body);
                self.stmts(&l.else_body);
            }
            Stmt::IfCond(c) => {
                self.expr(&c.expr);
                self.stmts(&c.true_body);
                self.stmts(&c.false_body);
            }
            Stmt::WithBlock(w) => {
                w.assignments.iter().for_each(|(_, e)| self.expr(e));
                self.stmts(&w.body);
            }
            Stmt::Set(s) => self.set(s.span(), &s.target, &s.expr),
            Stmt::SetBlock(s) => {
                if let Some(filter) = &s.filter {
                    self.set_filter(&s.target, filter);
                }
                self.stmts(&s.body);
            }
            Stmt::AutoEscape(a) => {
                self.expr(&a.enabled);
                self.stmts(&a.body);
            }
            Stmt::FilterBlock(f) => {
                self.expr(&f.filter);
                self.stmts(&f.body);
            }
            Stmt::Block(b) => self.stmts(&b.body),
            Stmt::Import(i) => self.expr(&i.expr),
            Stmt::FromImport(i) => self.expr(&i.expr),
            Stmt::Extends(e) => self.expr(&e.name),
            Stmt::Include(i) => self.expr(&i.name),
            Stmt::Macro(m) => {
                m.defaults.iter().for_each(|e| self.expr(e));
                self.stmts(&m.body);
            }
            Stmt::CallBlock(c) => {
                self.call(&c.call);
                c.macro_decl.defaults.iter().for_each(|e| self.expr(e));
                self.stmts(&c.macro_decl.body);
            }
            Stmt::Do(d) => self.call(&d.call),
        }
    }

    /// `{% set target = value %}`. A tuple without parentheses has no span of its own, so the text after the `=` is
    /// taken; no target contains that sign.
    fn set(&mut self, span: Span, target: &Expr<'_>, value: &Expr<'_>) {
        let mut stores = Vec::new();
        targets(target, &mut stores);
        if self.check {
            let inner = self.stored(&stores, value);
            return self.expr(inner);
        }
        let (start, end) = (span.start_offset as usize, span.end_offset as usize);
        let Some(equals) = self.source.get(start..end).and_then(|text| text.find('=')) else {
            return self.missing(span);
        };
        let start = start + equals + 1;
        let parts = match value {
            Expr::Tuple(tuple) => {
                let open = self.source.get(start..tuple.span().start_offset as usize);
                open.is_none_or(|gap| !gap.trim().is_empty()).then_some(&tuple.items)
            }
            _ => None,
        };
        let mut filters = String::new();
        match parts {
            Some(items) => {
                items.iter().for_each(|e| self.expr(e));
                filters.push_str(&format!("|{GUARD}"));
            }
            None => self.expr(value),
        }
        stores.iter().for_each(|store| filters.push_str(&store.filter()));
        if !filters.is_empty() {
            self.wrap(start, end, &filters);
        }
    }

    /// `{% set target | filter %}`: without a filter the value is text.
    fn set_filter(&mut self, target: &Expr<'_>, filter: &Expr<'_>) {
        let mut stores = Vec::new();
        targets(target, &mut stores);
        if self.check {
            let inner = self.stored(&stores, filter);
            return self.expr(inner);
        }
        self.expr(filter);
        let text: String = stores.iter().map(Store::filter).collect();
        self.inserts.push((end_of(filter), text));
    }

    /// Takes off the filters that [`Pass::set`] put on.
    fn stored<'e, 'a>(&mut self, stores: &[Store], value: &'e Expr<'a>) -> &'e Expr<'a> {
        let mut inner = value;
        for store in stores.iter().rev() {
            match inner {
                Expr::Filter(f) if f.name == STORE && store.is(&f.args) && f.expr.is_some() => {
                    inner = f.expr.as_ref().unwrap_or(inner);
                }
                other => self.missing(other.span()),
            }
        }
        inner
    }

    fn expr(&mut self, expr: &Expr<'_>) {
        self.visit(expr, false, false);
    }

    /// What is taken apart at once. A slice there needs no guard, and no filter fits between the two.
    fn base(&mut self, expr: &Expr<'_>) {
        self.visit(expr, false, matches!(expr, Expr::Slice(_)));
    }

    /// `guarded`: the expression is the operand of our filter. `passing`: its value goes nowhere but into the next
    /// operation, whose result is guarded if it can grow.
    fn visit(&mut self, expr: &Expr<'_>, guarded: bool, passing: bool) {
        match expr {
            Expr::Var(_) | Expr::Const(_) => {}
            Expr::Slice(s) => {
                self.base(&s.expr);
                [&s.start, &s.stop, &s.step].into_iter().flatten().for_each(|e| self.expr(e));
            }
            Expr::UnaryOp(u) => self.base(&u.expr),
            Expr::BinOp(b) => {
                let chain = is_add(&b.left) && is_add(expr) && (passing || grows(expr));
                self.visit(&b.left, false, chain);
                self.expr(&b.right);
            }
            Expr::Compare(c) => {
                self.expr(&c.expr);
                c.ops.iter().for_each(|op| self.expr(&op.expr));
            }
            Expr::IfExpr(i) => {
                self.expr(&i.test_expr);
                self.expr(&i.true_expr);
                i.false_expr.iter().for_each(|e| self.expr(e));
            }
            Expr::Filter(f) => {
                let ours = f.name == GUARD;
                f.expr.iter().for_each(|e| self.visit(e, ours, false));
                self.args(&f.args);
                if ours {
                    return;
                }
            }
            Expr::Test(t) => {
                self.expr(&t.expr);
                args(&t.args).for_each(|e| self.base(e));
            }
            Expr::GetAttr(g) => self.base(&g.expr),
            Expr::GetItem(g) => {
                self.base(&g.expr);
                self.expr(&g.subscript_expr);
            }
            Expr::Call(c) => self.call(c),
            Expr::List(l) => l.items.iter().for_each(|e| self.expr(e)),
            Expr::Tuple(t) => t.items.iter().for_each(|e| self.expr(e)),
            Expr::Map(m) => m.keys.iter().chain(&m.values).for_each(|e| self.expr(e)),
        }
        if guarded || passing || !grows(expr) {
            return;
        }
        if self.check {
            return self.missing(expr.span());
        }
        if let Expr::Filter(_) | Expr::Slice(_) = expr {
            // Only the end of such a span is exact, and the end is enough.
            self.inserts.push((end_of(expr), format!("|{GUARD}")));
        } else {
            let start = expr.span().start_offset as usize;
            // A filter binds tighter than an operator, and looser than what follows a literal.
            let operator = matches!(expr, Expr::BinOp(_));
            let (open, close) = if operator { ("((", ")") } else { ("(", "") };
            self.inserts.push((start, open.to_string()));
            self.inserts.push((end_of(expr), format!("{close}|{GUARD})")));
        }
    }

    fn call(&mut self, call: &Call<'_>) {
        self.base(&call.expr);
        self.args(&call.args);
    }

    fn args(&mut self, list: &[CallArg<'_>]) {
        args(list).for_each(|e| self.expr(e));
    }
}

fn args<'e, 'a>(list: &'e [CallArg<'a>]) -> impl Iterator<Item = &'e Expr<'a>> {
    list.iter().map(|arg| match arg {
        CallArg::Pos(e) | CallArg::Kwarg(_, e) | CallArg::PosSplat(e) | CallArg::KwargSplat(e) => e,
    })
}

fn is_add(expr: &Expr<'_>) -> bool {
    matches!(expr, Expr::BinOp(b) if matches!(b.op, BinOpKind::Add))
}

fn end_of(expr: &Expr<'_>) -> usize {
    expr.span().end_offset as usize
}

/// Whether an expression by itself can give a list or dict larger or deeper than its operands.
fn grows(expr: &Expr<'_>) -> bool {
    let literal = |e: &Expr<'_>| matches!(e, Expr::Const(_));
    match expr {
        Expr::List(l) => !l.items.iter().all(literal),
        Expr::Tuple(t) => !t.items.iter().all(literal),
        Expr::Map(m) => !m.keys.iter().chain(&m.values).all(literal),
        Expr::Slice(_) => true,
        Expr::Filter(f) => f.name != GUARD && f.name != STORE && !SCALAR.contains(&f.name),
        Expr::BinOp(b) => match b.op {
            // A text or a number added to anything else than its like is an error.
            BinOpKind::Add => !literal(&b.left) && !literal(&b.right),
            BinOpKind::Mul => !(literal(&b.left) && literal(&b.right)),
            _ => false,
        },
        _ => false,
    }
}

/// An attribute that an assignment sets.
struct Store {
    /// The namespace, as source.
    base: String,
    name: String,
}

impl Store {
    fn filter(&self) -> String {
        format!("|{STORE}({}, '{}')", self.base, self.name)
    }

    fn is(&self, args: &[CallArg<'_>]) -> bool {
        match args {
            [CallArg::Pos(base), CallArg::Pos(Expr::Const(name))] => {
                path(base).as_deref() == Some(&self.base) && name.value.as_str() == Some(&self.name)
            }
            _ => false,
        }
    }
}

fn targets(target: &Expr<'_>, out: &mut Vec<Store>) {
    match target {
        Expr::List(list) => list.items.iter().for_each(|e| targets(e, out)),
        Expr::GetAttr(attr) => {
            let base = path(&attr.expr).unwrap_or_default();
            out.push(Store { base, name: attr.name.to_string() });
        }
        _ => {}
    }
}

/// `a.b.c` as source.
fn path(expr: &Expr<'_>) -> Option<String> {
    match expr {
        Expr::Var(var) => Some(var.id.to_string()),
        Expr::GetAttr(attr) => Some(format!("{}.{}", path(&attr.expr)?, attr.name)),
        _ => None,
    }
}
